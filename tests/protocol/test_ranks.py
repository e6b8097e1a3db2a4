"""Which groups are refused, by worker and operator alike."""

from __future__ import annotations

from typing import Any

import pytest

from radixgrove.protocol.ranks import UnsupportedRanks, check_ranks

ONE = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "ranks": 1, "nodes": 1}


@pytest.mark.parametrize(
    "group",
    [
        {},
        {"tp": 4, "ranks": 4},
        {"pp": 3, "ranks": 3, "nodes": 3},
        {"tp": 3, "pp": 2, "ranks": 6, "nodes": 2},
        {"pp": 2, "ranks": 2},
        {"tp": 4, "ep": 2, "ranks": 4},
        {"dp": 2, "tp": 4, "ranks": 8},
        {"dp": 2, "pp": 2, "ranks": 4, "nodes": 2},
    ],
)
def test_groups_that_this_version_runs(group: dict[str, Any]) -> None:
    check_ranks(**{**ONE, **group})


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"ranks": 8}, r"8 ranks on 1 node, and tp 1 \* pp 1 \* dp 1 is 1"),
        ({"tp": 3, "pp": 4, "ranks": 12, "nodes": 3}, "tp must divide the ranks of a machine"),
        ({"pp": 3, "ranks": 3, "nodes": 2}, "nodes must divide"),
        ({"ep": 2}, "^the group has 1 rank on 1 node, and ep 2"),
        (
            {"tp": 4, "ep": 3, "ranks": 4},
            r"ep 3 does not divide tp \* dp, which is 4; possible: 1, 2, 4$",
        ),
        ({"tp": 2, "dp": 2, "ep": 4, "ranks": 4}, "members share no experts"),
        (
            {"dp": 2, "pp": 2, "ranks": 4, "nodes": 4},
            "a member beside others is on one machine",
        ),
    ],
)
def test_other_groups_are_refused_by_name(group: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedRanks, match=words):
        check_ranks(**{**ONE, **group})
