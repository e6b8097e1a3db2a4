"""The page of drills quotes what was recorded."""

from __future__ import annotations

from tests.checkout import ROOT
from tests.drills.table import table


def test_the_table_is_that_of_the_newest_figures() -> None:
    assert table() in (ROOT / "docs" / "reliability.md").read_text()
