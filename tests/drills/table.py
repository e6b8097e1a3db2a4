"""The tables of `docs/reliability.md`: the newest figure of each drill, and the newest soak.

python -m tests.drills.table
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.checkout import ROOT

_COLUMNS = {
    "value": "failed",
    "requests": "of",
    "cut_streams": "cut streams",
    "lost": "lost",
    "slowest_s": "slowest answer, s",
    "healthy_after_s": "healthy after, s",
    "memory_grown_mib": "memory grown, MiB",
}
_ENDS = ("whole", "cut", "lost", "failed", "truncated", "wrong")


def drills() -> str:
    newest = {line["workload"]: line for line in _lines("drills")}
    rows = [[name, *(line.get(key, 0) for key in _COLUMNS)] for name, line in newest.items()]
    return _table(["fault", *_COLUMNS.values()], rows)


def soak() -> str:
    line = _lines("soak")[-1]
    ends, faults = line["requests"], line["faults"]
    low, slope, high = line["memory_mib_an_hour"]["together"]
    heads = [*_ENDS, "faults", "memory, MiB an hour (95 %)", "findings"]
    row = [*(ends.get(end, 0) for end in _ENDS), sum(faults.values()), f"{slope} ({low} to {high})"]
    return _table(heads, [[*row, line["value"]]])


def _lines(benchmark: str) -> list[dict[str, Any]]:
    file = ROOT / "benchmarks" / "results" / f"{benchmark}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    print(drills(), soak(), sep="\n\n")
