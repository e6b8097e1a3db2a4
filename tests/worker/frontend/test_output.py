"""What models write, taken apart: the same events however it is cut, by every built-in format."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.formats.table import FORMATS
from radixgrove.worker.frontend.call_reader import Outcome
from radixgrove.worker.frontend.events import CallArguments
from radixgrove.worker.frontend.markers import Markers
from tests.conftest import examples
from tests.worker.frontend.samples import (
    ARGUMENTS,
    CALLS,
    SAMPLES,
    form_of,
    markers_of,
    parser_of,
    read,
)

MARKED = sorted(set(SAMPLES) - {"llama3", "llama4"})  # their calls stand alone, without a marker
JSON_NAMES = ["deepseek-v3.1", "hermes", "kimi-k2", "mistral"]


def output_of(name: str) -> str:
    said = "Let me see." if name in MARKED else ""
    return f"<think>\nTwo calls.\n</think>\n\n{said}{SAMPLES[name]}"


def test_every_format_has_a_sample() -> None:
    assert {*SAMPLES, "gpt-oss"} == set(FORMATS)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_turn_in_every_format(name: str, tokens: bool) -> None:
    if not tokens and name in ("hermes", "qwen3-coder", "glm"):
        pytest.skip("a marker inside an argument is none only where markers are tokens")
    form = form_of(name)
    markers = markers_of(form, tokens=tokens)
    turn, parser = read(form, markers, [_inner(markers, output_of(name))])
    assert turn.reasoning == "Two calls."
    assert turn.text == ("Let me see." if name in MARKED else "")
    assert turn.read == CALLS
    assert turn.ended == [0, 1]
    assert parser.outcomes == [Outcome.WHOLE] * 2


def _inner(markers: object, text: str) -> str:
    """The output as tokens make it: the marker in the argument was written letter by letter."""
    secret = "not </tool_call>"
    parts = text.split(secret)
    inner = markers.inner  # type: ignore[attr-defined]
    return secret.join(inner(part) for part in parts)


@examples(60)
@given(data=st.data())
@pytest.mark.parametrize("name", SAMPLES)
def test_any_cuts_give_the_events_of_the_whole(name: str, data: st.DataObject) -> None:
    form = form_of(name)
    markers = markers_of(form)
    text = _inner(markers, output_of(name))
    end = data.draw(st.integers(0, len(text)), "end")
    cuts = data.draw(st.lists(st.integers(0, end), max_size=12).map(sorted), "cuts")
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    assert read(form, markers, pieces)[0] == read(form, markers, [text[:end]])[0]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_output_that_ends_anywhere_begins_as_the_whole_does(name: str) -> None:
    """What was said stays said; a call that is not whole is no whole call."""
    form = form_of(name)
    markers = markers_of(form)
    text = _inner(markers, output_of(name))
    whole, _ = read(form, markers, [text])
    for end in range(len(text)):
        turn, parser = read(form, markers, list(text[:end]))
        assert whole.reasoning.startswith(turn.reasoning.rstrip())
        assert turn.read == CALLS[: len(turn.ended)]
        for (called, arguments), (expected, all_of_it) in zip(
            turn.calls, whole.calls, strict=False
        ):
            assert called == expected
            assert all_of_it.startswith(arguments)
        assert parser.outcomes.count(Outcome.WHOLE) == len(turn.ended)
        assert len(turn.calls) - len(turn.ended) == parser.outcomes.count(Outcome.CUT)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@examples(60)
@given(arguments=st.dictionaries(st.text(max_size=6), _values, max_size=4), ascii=st.booleans())
@pytest.mark.parametrize("name", JSON_NAMES)
def test_any_arguments_come_back(name: str, arguments: dict[str, Any], ascii: bool) -> None:
    form = form_of(name)
    markers = markers_of(form)
    written = json.dumps(arguments, ensure_ascii=ascii)
    text = SAMPLES[name].replace(ARGUMENTS, Markers.clean(written))
    turn, _ = read(form, markers, list(markers.inner(text)))
    assert turn.read == [("weather", json.loads(Markers.clean(written))), ("now", {})]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "lfm2", "gemma4", "llama3"])
def test_a_megabyte_of_arguments_takes_time_in_proportion(name: str) -> None:
    form = form_of(name)
    markers = markers_of(form)
    head, _, tail = markers.inner(SAMPLES[name]).partition("Zürich")

    def seconds(size: int) -> float:
        text = head + "word and " * (size // 9) + tail
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        parser = parser_of(form, markers)
        began = time.process_time()
        parts = [part for piece in pieces for part in parser.feed(piece)]
        spent = time.process_time() - began
        assert sum(len(part.text) for part in parts if isinstance(part, CallArguments)) > size * 0.9
        return spent

    small, large = seconds(1 << 17), seconds(1 << 20)
    assert large < 40 * small  # eight times the text; a square would be 64


def test_reasoning_begins_where_the_prompt_or_the_model_begins_it() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    for begun, text in ((True, "Hm.</think>\n\nYes."), (False, "<think>Hm.</think>Yes.")):
        turn, _ = read(form, markers, [markers.inner(text)], in_reasoning=begun)
        assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    turn, _ = read(form, markers, ["Just this.\n"])
    assert (turn.reasoning, turn.text) == ("", "Just this.\n")


def test_markers_that_are_tokens_count_only_as_tokens() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    typed = 'I would write <tool_call>{"name": "now"}</tool_call> and </think>.'
    turn, _ = read(form, markers, [typed])
    assert (turn.text, turn.calls) == (typed, [])


def test_without_tools_calls_are_text() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    turn, _ = read(form, markers, [markers.inner(text)], offered=None)
    assert (turn.text, turn.calls) == (text, [])


def test_a_call_is_text_if_it_is_malformed_before_its_name_is_known() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    text = "See: <tool_call>not a call</tool_call> and so on"
    turn, parser = read(form, markers, [markers.inner(text)])
    assert turn.text == text
    assert turn.calls == []
    assert parser.outcomes == [Outcome.TEXT]


@pytest.mark.parametrize("name", JSON_NAMES)
def test_a_call_that_is_malformed_later_stands_as_it_came(name: str) -> None:
    form = form_of(name)
    markers = markers_of(form)
    end = form.calls.call[1] if form.calls and form.calls.call[1] else "[TOOL_CALLS]"
    text = SAMPLES[name].split(json.dumps(CALLS[0][1], ensure_ascii=False))[0]
    turn, parser = read(form, markers, [markers.inner(f'{text}{{"city": {end}')])
    assert turn.calls == [["weather", '{"city": ']]
    assert parser.outcomes[0] is Outcome.MALFORMED


@pytest.mark.parametrize(
    "answer",
    ['{"capital": "Paris"}', '{"name": "Paris", "parameters": {}}', '[1, 2, {"name": "now"}]', "["],
)
@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_an_answer_that_only_begins_like_calls_is_text(name: str, answer: str) -> None:
    form = form_of(name)
    turn, _ = read(form, markers_of(form), list(answer))
    assert (turn.text, turn.calls) == (answer, [])


@pytest.mark.parametrize(
    ("written", "expected"),
    [(r"\ud83c\udf36\n", "🌶\n"), (r"\ud83c", "\ufffd"), (r"\x41\q", "Aq")],
)
def test_escapes_in_literals_are_text(written: str, expected: str) -> None:
    form = form_of("lfm2")
    markers = markers_of(form)
    text = f"<|tool_call_start|>[weather(city='{written}')]<|tool_call_end|>"
    turn, _ = read(form, markers, [markers.inner(text)])
    assert turn.read == [("weather", {"city": expected})]
    turn.calls[0][1].encode()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "7" * 5000])
def test_numbers_that_no_json_has_make_no_call(number: str) -> None:
    form = form_of("lfm2")
    markers = markers_of(form)
    text = f"<|tool_call_start|>[weather(days={number})]<|tool_call_end|>"
    turn, parser = read(form, markers, [markers.inner(text)])
    assert (turn.text, turn.calls) == (text, [])
    assert parser.outcomes == [Outcome.TEXT]


def test_a_malformed_schema_of_an_argument_says_nothing_of_its_type() -> None:
    form = form_of("glm")
    markers = markers_of(form)
    text = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    offered = {"f": {"a": Values({}).types({"anyOf": 5})}}
    turn, _ = read(form, markers, [markers.inner(text)], offered=offered)
    assert turn.read == [("f", {"a": 1})]


def test_a_call_without_arguments_has_none() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"arguments": {"a": 1}, "name": "now"}'
    turn, _ = read(form, markers, [markers.inner(text + "</tool_call>")])
    assert turn.read == [("now", {}), ("now", {"a": 1})]


def test_a_call_before_the_end_of_reasoning_ends_it() -> None:
    form = form_of("hermes")
    markers = markers_of(form)
    text = '<think>I call.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    turn, _ = read(form, markers, [markers.inner(text)])
    assert (turn.reasoning, turn.text, turn.read) == ("I call.", "", [("now", {})])


MESSAGES = (
    "<|channel|>analysis<|message|>Two calls.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|end|>"
    "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}"
)


@examples(60)
@given(data=st.data())
def test_an_output_of_messages(data: st.DataObject) -> None:
    form = FORMATS["gpt-oss"]
    markers = markers_of(form)
    text = _inner(markers, MESSAGES)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted), "cuts")
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    turn, _ = read(form, markers, pieces)
    assert (turn.reasoning, turn.text, turn.read) == ("Two calls.", "Let me see.", CALLS)
    answer = markers.inner("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant")
    answer += markers.inner("<|channel|>final<|message|>Yes.")
    turn, _ = read(form, markers, list(answer))
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    assert read(form, markers, ["Just text"])[0].text == "Just text"
