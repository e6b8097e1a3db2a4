"""Which tests `make check` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.touched import changed_files, select_tests


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("worker/radixgrove/worker/scheduler/queue.py", "tests/worker/scheduler"),
        ("router/radixgrove/router/proxy.py", "tests/router"),
        ("operator/radixgrove/operator/planning/plan.py", "tests/operator/planning"),
        ("docs/api.md", "tests/docs"),
        ("tests/worker/scheduler/harness.py", "tests/worker/scheduler"),
        ("tests/router/test_placing.py", "tests/router/test_placing.py"),
        ("tools/touched.py", "tests/tools"),
    ],
)
def test_a_file_has_the_tests_of_the_folder_that_mirrors_its_own(
    changed: str, expected: str
) -> None:
    assert expected in select_tests([changed])


def test_what_imports_a_file_is_run_too() -> None:
    tests = select_tests(["worker/radixgrove/worker/scheduler/scheduler.py"])
    assert "tests/worker/scheduler" in tests
    assert "tests/e2e/test_parity.py" in tests  # by a helper beside it


def test_no_test_is_named_twice_and_none_that_is_gone() -> None:
    changed = ["tests/router/test_placing.py", "tests/router/harness.py", "tests/router/test_no.py"]
    assert select_tests(changed) == ["tests/router"]
    assert select_tests(["LICENSE"]) == []


def test_what_differs_is_found_whether_committed_or_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "--quiet", "--initial-branch=main")
    for name in ("kept", "edited", "committed"):
        (tmp_path / name).write_text("before")
        git("add", name)
    git("commit", "--quiet", "--message=first")
    git("checkout", "--quiet", "-b", "branch")
    (tmp_path / "committed").write_text("after")
    git("commit", "--quiet", "--all", "--message=second")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "new").write_text("after")
    assert changed_files("main", tmp_path) == ["committed", "edited", "new"]
