"""The page of drills quotes what was recorded."""

from __future__ import annotations

from tests.checkout import ROOT
from tests.drills import table


def test_the_tables_are_those_of_the_newest_figures() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert table.drills() in page
    assert table.soak() in page
