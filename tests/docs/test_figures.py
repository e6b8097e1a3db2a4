"""Documents quote what was recorded: every figure of their tables stands in benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "performance.md"
KEYS = {
    *("benchmark", "workload", "model", "subject", "metric", "value", "unit"),
    *("device", "commit", "date"),
}
_FIGURE = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?! ?×)")
_NO_FIGURES = {"commit", "of offline", "of the limit"}  # columns of names, or of ratios


def lines() -> list[tuple[str, dict[str, Any]]]:
    """Every recorded line and its file's name."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    return [(file.stem, json.loads(line)) for file in files for line in file.open()]


def quoted() -> Iterator[tuple[str, str]]:
    """Figures in the cells of the page's tables, and the row each is in; labels left out."""
    header: list[str] | None = None
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        for name, cell in zip(header, cells, strict=True):
            if not re.match(r"[A-Za-z`-]", cell) and name not in _NO_FIGURES:
                for figure in _FIGURE.findall(re.sub(r"[\d.,]+ ×", "", cell)):
                    yield figure, line


def test_every_line_says_what_it_is() -> None:
    for name, line in lines():
        assert line.keys() >= KEYS, (name, line)
        assert line["benchmark"] == name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
        assert isinstance(line["value"], bool | int | float)
        assert line["commit"] or line["subject"] != "radixgrove"


def test_tables_quote_recorded_figures() -> None:
    values = [
        float(value)
        for _, line in lines()
        for value in line.values()
        if isinstance(value, int | float)
    ]
    found = list(quoted())
    assert len(found) > 60
    for figure, row in found:
        decimals = len(figure.partition(".")[2])
        number, slack = float(figure.replace(",", "")), 0.5001 * 10**-decimals
        assert any(abs(value - number) <= slack for value in values), f"{figure} in {row}"


def test_the_readme_says_how_long_the_first_minutes_take() -> None:
    latest = {line["metric"]: line["value"] for name, line in lines() if name == "start_up"}
    words = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    for metric, text in (
        ("set_up", "{} s on two cores"),
        ("first_start", "then {} s for the first start"),
        ("warm_start", "later such a start took {} s"),
    ):
        assert text.format(latest[metric]) in words
    words = re.sub(r"\s+", " ", (ROOT / "docs" / "kubernetes.md").read_text())
    wall, cpu = latest["demo_cluster_wall"], latest["demo_cluster_cpu"]
    assert f"a clean clone answered after {wall:.0f} s, with {cpu:.0f} s of CPU" in words


def test_a_figure_without_its_keys_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    whole = dict.fromkeys(results.KEYS, "x") | {"value": 1}
    results.record(whole)
    (line,) = (tmp_path / "x.jsonl").read_text().splitlines()
    assert json.loads(line).keys() >= KEYS
    del whole["model"]
    with pytest.raises(ValueError, match="needs model"):
        results.record(whole)
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 1
