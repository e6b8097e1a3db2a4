"""Where ranks stand, over all shapes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixgrove.protocol.ranks import UnsupportedRanks
from radixgrove.worker.parallel.layout import Layout

few = st.integers(1, 6)


@given(tp=few, pp=few, dp=few, nodes=few)
def test_every_rank_has_one_place_and_no_stage_leaves_its_machine(
    tp: int, pp: int, dp: int, nodes: int
) -> None:
    assume((tp * pp * dp) % nodes == 0)
    assume((tp * pp * dp // nodes) % tp == 0)
    layout = Layout(tp, pp, dp, nodes)
    places = [layout.place(rank) for rank in range(layout.size)]

    assert [layout.rank(p.member, p.stage, p.shard) for p in places] == list(range(layout.size))
    assert {(p.node, p.local_rank) for p in places} == {
        (node, local) for node in range(nodes) for local in range(layout.ranks_per_node)
    }
    for node in range(nodes):
        assert [p.rank for p in places if p.node == node] == list(layout.ranks_of(node))
    for member in range(dp):
        ranks = list(layout.ranks_of_member(member))
        assert ranks == [p.rank for p in places if p.member == member]
        assert [rank for shards in layout.shards(member) for rank in shards] == ranks
        for shards in layout.shards(member):
            stage = [places[rank] for rank in shards]
            assert [p.shard for p in stage] == list(range(tp))
            assert len({(p.member, p.stage) for p in stage}) == 1
            assert len({p.node for p in stage}) == 1
        assert [p.rank for p in places if p.member == member and p.leads] == [ranks[0]]
        assert layout.leader(member) == ranks[0]
        last = places[layout.last_stage(member)]
        assert (last.member, last.stage, last.shard) == (member, pp - 1, 0)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 1, 1, 2), "cannot be shared out evenly among 2 machines"),
        ((3, 4, 1, 3), "tp must divide the ranks of a machine"),
        ((3, 2, 1, 3), "tp must divide the ranks of a machine"),
    ],
)
def test_a_stage_that_would_straddle_machines_is_refused(
    shape: tuple[int, int, int, int], words: str
) -> None:
    with pytest.raises(UnsupportedRanks, match=words):
        Layout(*shape)


def test_a_rank_beyond_the_group_has_no_place() -> None:
    with pytest.raises(UnsupportedRanks, match="rank 4 is not one of 4"):
        Layout(2, 2).place(4)
