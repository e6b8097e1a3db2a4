"""What `make smoke` takes for a failure."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from radixgrove.cli.demonstration import Shown
from tools import smoke
from tools.smoke import SmokeFailure, check_answers

GOOD = [
    Shown("France?", "Paris", "It is Paris.", "replica-0", 20, 0),
    Shown("Italy?", "Rome", "Rome!", "replica-1", 120, 0),
    Shown("Germany?", "Berlin", "Berlin.", "replica-1", 120, 96),
]


def test_right_answers_and_a_prefix_found_again_pass() -> None:
    check_answers(GOOD)


@pytest.mark.parametrize(
    ("position", "changes", "reason"),
    [
        (0, {"answer": "It is Lyon."}, "'France\\?' was answered 'It is Lyon.'"),
        (2, {"answer": ""}, "'Germany\\?' was answered ''"),
        (2, {"replica": "replica-0"}, "one prefix went to replica-1 and to replica-0"),
        (2, {"cached_tokens": 0}, "the repeated prefix was computed again"),
    ],
)
def test_anything_else_fails(position: int, changes: dict[str, object], reason: str) -> None:
    shown = list(GOOD)
    shown[position] = replace(shown[position], **changes)  # type: ignore[arg-type]
    with pytest.raises(SmokeFailure, match=reason):
        check_answers(shown)


def test_a_process_that_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "_GONE_DEADLINE", 0.2)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # left behind"])
    try:
        with pytest.raises(SmokeFailure, match=rf"left behind \(process {left.pid}\)"):
            smoke._check_gone()
    finally:
        left.kill()
        left.wait()
