"""Events on their way to a client: whole, in order, and with one end."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.router.event_stream import MAX_LINE_BYTES, EventStream

BROKEN = b'data: {"error": {"message": "ours"}}\n\n'

spaces = st.sampled_from([b"", b" ", b"  ", b"\t"])
line_ends = st.sampled_from([b"\n", b"\r\n"])


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


texts = st.sampled_from(['{"error"}', "[DONE]", "data: [DONE]", "tök", ""]) | st.text(max_size=5)
errors = st.sampled_from(
    [
        {"error": {"message": "theirs"}},
        {"id": "x", "error": {"message": "theirs"}},
        {"object": "error", "message": "theirs"},
        {"type": "error", "message": "theirs"},
    ]
)


@st.composite
def events(draw: st.DrawFn) -> tuple[str, bytes]:
    """Its kind, and its bytes as some engine would space them."""
    kind = draw(st.sampled_from(["delta", "delta", "delta", "comment", "error", "done"]))
    end, space = draw(line_ends), draw(spaces)
    if kind == "comment":
        return kind, b": ping" + end + end
    if kind == "done":
        return kind, b"data:" + space + b"[DONE]" + draw(spaces) + end + end
    data = draw(errors) if kind == "error" else delta(draw(texts))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    body = json.dumps(data, separators=separators).encode()
    return kind, b"data:" + space + body + end + end


def pieces(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    return [whole[left:right] for left, right in pairwise(edges) if right > left]


def dispatched(stream: bytes) -> list[Any]:
    """What a client's parser makes of the bytes: the data of each event."""
    found = []
    for block in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        if data:
            joined = b"\n".join(data)
            found.append("[DONE]" if joined == b"[DONE]" else json.loads(joined))
    return found


def is_error(event: Any) -> bool:
    return isinstance(event, dict) and "choices" not in event


@given(
    sent=st.lists(events(), max_size=6),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
    loses=st.integers(0, 60),
    in_order=st.booleans(),
)
def test_a_client_gets_what_was_whole_and_one_end(
    sent: list[tuple[str, bytes]], cuts: list[int], loses: int, in_order: bool
) -> None:
    """However engines space events, wherever the network cuts them and however the stream ends."""
    whole = b"".join(data for _, data in sent)
    arrived = whole[: len(whole) - loses] if loses < len(whole) else whole
    stream = EventStream()
    got = b"".join(stream.pass_on(piece) for piece in pieces(arrived, cuts))
    if in_order:
        got += stream.ended()
    got += stream.broken(BROKEN)
    seen = dispatched(got)

    kinds = [kind for kind, _ in sent]
    last = next((i for i, kind in enumerate(kinds) if kind in ("error", "done")), None)
    before = [d for kind, d in sent[:last] if kind == "delta"]
    if last is not None and len(b"".join(d for _, d in sent[: last + 1])) <= len(arrived):
        # The end came: exactly what was before it, it, and nothing more.
        assert seen[:-1] == [dispatched(data)[0] for data in before]
        assert seen[-1] == dispatched(sent[last][1])[0]
        assert stream.done == (kinds[last] == "done")
    elif stream.over and (stream.done or not got.endswith(BROKEN)):
        # All of the end but its line ends had come.
        assert last is not None
        assert seen[-1] == dispatched(sent[last][1])[0]
    else:
        complete = seen[:-1]
        assert seen[-1] == {"error": {"message": "ours"}}
        assert complete == [dispatched(data)[0] for data in before][: len(complete)]
    assert sum(map(is_error, seen)) == (0 if stream.done else 1)
    assert "[DONE]" not in seen[:-1]


def test_what_comes_behind_the_end_stays_behind() -> None:
    stream = EventStream()
    assert stream.pass_on(b'data:[DONE]\r\n\r\ndata: {"error": 1}\n\n') == b"data:[DONE]\r\n\n"
    assert stream.done
    assert stream.pass_on(b'data: {"error": 1}\n\n') == b""
    assert stream.broken(BROKEN) == b""


@pytest.mark.parametrize("beginning", [b"data: ", b": "])
def test_a_line_that_is_too_long_to_be_held_is_passed_on_in_parts(beginning: bytes) -> None:
    stream = EventStream()
    chunk = b"x" * (MAX_LINE_BYTES // 2)
    got = stream.pass_on(beginning + chunk) + stream.pass_on(chunk) + stream.pass_on(chunk)
    assert got.startswith(beginning + chunk)
    # What broke in it is an event of its own, and a client may still read the one that says so.
    assert stream.broken(BROKEN) == b"\n\n" + BROKEN
