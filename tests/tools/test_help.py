"""Asking a program what it does does not do it."""

from __future__ import annotations

import pytest

from benchmarks.cluster import start_up
from tools import reference


@pytest.mark.parametrize("main", [start_up.main, reference.main], ids=["start_up", "reference"])
def test_help_is_all_that_happens(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m " in capsys.readouterr().out
