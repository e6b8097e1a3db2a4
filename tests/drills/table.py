"""The table of `docs/reliability.md`, from the newest figure of each drill.

python -m tests.drills.table
"""

from __future__ import annotations

import json

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


def table() -> str:
    file = ROOT / "benchmarks" / "results" / "drills.jsonl"
    newest = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        newest[line["workload"]] = line
    rows = [["fault", *_COLUMNS.values()], ["---", *["--:"] * len(_COLUMNS)]]
    rows += [
        [name, *(str(line.get(column, 0)) for column in _COLUMNS)] for name, line in newest.items()
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(table())
