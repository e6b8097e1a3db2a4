"""What drills and soaks go by: how an answer ended, and whether a line rises."""

from __future__ import annotations

import json
import random

import pytest

from tests.drills.load import Answer, End, judge
from tests.drills.trend import trend

DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "gone"}}\n\n'


def event(text: str, index: int = 0) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("raw", "broken", "end"),
    [
        (event("ab") + event("c") + DONE, "", End.WHOLE),
        (event("ab") + event("x") + DONE, "", End.WRONG),
        (event("ab") + DONE, "", End.WRONG),
        (event("ab"), "", End.TRUNCATED),
        (event("ab") + ERROR, "", End.CUT),
        (event("ab") + ERROR + DONE, "", End.CUT),
        (event("ab") + ERROR + ERROR, "", End.TRUNCATED),
        (event("ab") + ERROR + event("c"), "", End.TRUNCATED),
        (event("ab") + b"data: {", "closed", End.CUT),
        (event("xx"), "closed", End.WRONG),
        (ERROR, "", End.FAILED),
        (b"", "closed", End.LOST),
        (b": ping\n\n" + event("abc") + DONE, "", End.WHOLE),
        (b": ping\n\n", "closed", End.LOST),
        (event("ab") + b": ping\n\n", "closed", End.CUT),
        (event("abc") + b"data: nonsense\n\n" + DONE, "", End.WRONG),
        (b"", "", End.TRUNCATED),
    ],
)
def test_how_a_stream_ended(raw: bytes, broken: str, end: End) -> None:
    assert judge(Answer(200, raw, broken), ("abc",), stream=True)[0] is end


@pytest.mark.parametrize(
    ("text", "reason", "end"),
    [("abc", "stop", End.WHOLE), ("abc", None, End.TRUNCATED), ("ab", "length", End.WRONG)],
)
def test_how_a_whole_answer_ended(text: str, reason: str | None, end: End) -> None:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": reason}
    raw = json.dumps({"choices": [choice]}).encode()
    assert judge(Answer(200, raw), ("abc",), stream=False)[0] is end
    assert judge(Answer(503, raw), ("abc",), stream=False)[0] is End.FAILED
    assert judge(Answer(200, raw[:9], "closed"), ("abc",), stream=False)[0] is End.LOST


@pytest.mark.parametrize(("slope", "flat"), [(0.0, True), (20.0, False), (-20.0, False)])
def test_a_slope_is_told_from_noise(slope: float, flat: bool) -> None:
    draw = random.Random(1)
    points = [(5.0 * i, 100 + slope * 5 * i / 3600 + draw.gauss(0, 2)) for i in range(540)]
    found = trend(points)
    assert found.low < slope < found.high
    assert found.flat is flat
