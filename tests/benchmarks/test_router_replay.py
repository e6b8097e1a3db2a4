"""What the replay of a trace sends."""

from __future__ import annotations

from pathlib import Path

from benchmarks.load.router_replay import load_trace


def test_a_hash_id_is_as_many_blocks_as_it_has_tokens(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [0, 2]}\n{"hash_ids": [2]}\n')
    assert load_trace(trace, 2) == [[0, 2], [2]]
    long = load_trace(trace, 2, blocks=32)
    assert [len(request) for request in long] == [64, 32]
    assert long[0][32:] == long[1], "the same id is the same text"
    assert not {*long[0][:32]} & {*long[1]}
