"""Which groups a worker of this version runs: the worker and the operator ask the same question."""

from __future__ import annotations

from radixgrove.protocol.errors import InvalidInput


class UnsupportedRanks(InvalidInput):
    """A group of which a worker would leave ranks idle, or make two replicas of one."""


def check_ranks(*, tp: int, ranks: int, nodes: int) -> None:
    """Refuse a group of `ranks` on `nodes` that is not the `tp` ranks of one node.

    Raises:
        UnsupportedRanks: the message names both.
    """
    if (ranks, nodes) != (tp, 1):
        raise UnsupportedRanks(
            f"the group has {ranks} ranks on {nodes} nodes, and this worker runs the tp={tp} ranks "
            "of one node: it has no pipeline or data parallelism yet"
        )
