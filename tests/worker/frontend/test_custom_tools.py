"""Tools that take a text of some form instead of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.constraints.flatten import expression_of
from radixgrove.protocol.formats.lark import ToolError
from radixgrove.protocol.openai.bodies import ChatBody
from radixgrove.protocol.openai.tools import Tool, parse_tools
from radixgrove.worker.frontend.custom_inputs import CustomInputs
from radixgrove.worker.frontend.events import CallArguments, CallBegins, CallEnds
from tests.conftest import wait_until
from tests.protocol.formats.test_grammar import (
    ids_of,
    matcher_of,
    takes,
    turn_of,
    vocabulary,
    walk,
)
from tests.worker.frontend import tool_model
from tests.worker.frontend.conftest import Frontend, prompt_text, running_frontend

ASKED = [{"role": "user", "content": "Patch it."}]
LARK = r"""
start: "*** Begin" LF line+ "*** End"
line: ("+" | "-") /[a"\\\/<>]{0,3}/ LF
%import common.LF
"""
NESTED = 'start: "(" start ")" | "x"'
REGEX = r'[ab]{2,4}"\n?(/|\\)'


def custom(name: str = "patch", grammar: str | None = None, syntax: str = "lark") -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, "description": "Changes files."}
    if grammar is not None:
        text = {"definition": grammar, "syntax": syntax}
        described["format"] = {"type": "grammar", "grammar": text}
    return {"type": "custom", "custom": described}


def offered(*definitions: dict[str, Any]) -> tuple[Tool, ...]:
    tools = parse_tools(ChatBody(tools=list(definitions)))
    assert tools is not None
    return tools.offered


# ---- grammars --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "gpt-oss", "qwen3-coder", "glm"])
@pytest.mark.parametrize(
    ("tool", "expression"),
    [(custom(grammar=LARK), expression_of(LARK)), (custom(grammar=REGEX, syntax="regex"), REGEX)],
    ids=["lark", "regex"],
)
def test_inputs_are_of_the_grammar_whatever_the_model_writes(
    name: str, tool: dict[str, Any], expression: str
) -> None:
    """Quotes and line breaks too, which some formats escape and others do not."""
    seen = set()
    for seed in range(10):
        matcher = matcher_of(name, tools=offered(tool), parallel=False, schemas=False)
        turn = turn_of(name, walk(matcher, vocabulary(name)[1], seed))
        ((called, arguments),) = turn.read
        assert (called, set(arguments)) == ("patch", {"input"})
        assert re.fullmatch(expression, arguments["input"]), arguments
        seen.add(arguments["input"])
    assert len(seen) > 3
    assert any('"' in text for text in seen)


def test_a_grammar_with_recursion_needs_a_format_that_writes_texts_as_they_are() -> None:
    (tool,) = offered(custom(grammar=NESTED))
    call = "<tool_call>\n<function=patch>\n<parameter=input>\n((x))\n</parameter>\n</function>\n"
    text = call + "</tool_call>"
    matcher = matcher_of("qwen3-coder", tools=(tool,), parallel=False)
    assert takes(matcher, ids_of("qwen3-coder", text))
    matcher = matcher_of("qwen3-coder", tools=(tool,), parallel=False)
    assert not takes(matcher, ids_of("qwen3-coder", text.replace("((x))", "((x)")))
    for name, says in (("hermes", "refers to itself"), ("lfm2", "no JSON")):
        with pytest.raises(ToolError, match=says) as refused:
            matcher_of(name, tools=(tool,))
        assert refused.value.param == "tools[0].custom.format"


def test_a_tool_without_a_format_takes_any_text() -> None:
    (tool,) = offered(custom())
    assert tool.parameters is not None
    for arguments, passes in (({"input": 'a "b"\n'}, True), ({"input": 5}, False), ({}, False)):
        text = (
            f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        )
        for schemas in (True, False):
            matcher = matcher_of("hermes", tools=(tool,), schemas=schemas)
            assert takes(matcher, ids_of("hermes", text)) == passes
    jsonschema.Draft202012Validator.check_schema(json.loads(tool.parameters))


# ---- inputs out of arguments -----------------------------------------------------------------


def read(pieces: list[str]) -> str:
    inputs = CustomInputs({"patch"})
    parts: list[Any] = [
        CallBegins(0, "id", "patch"),
        *(CallArguments(0, piece) for piece in pieces),
        CallEnds(0),
    ]
    found = [seen for part in parts for seen in inputs.read(part)]
    assert found[0] == CallBegins(0, "id", "patch", custom=True)
    assert found[-1] == CallEnds(0)
    assert all(part.custom and part.text for part in found[1:-1])
    return "".join(part.text for part in found[1:-1])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(st.text(), st.booleans(), st.lists(st.integers(0, 10_000), max_size=8))
def test_an_input_is_the_same_in_any_pieces(text: str, ascii: bool, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    assert read(cut(arguments, places)) == text
    assert read(list(arguments)) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a"}', "a"),
        ('{ "input" : "a", "more": "b"}', "a"),
        (r'{"input": "\ud83d\ude00 \ud83d! \ude00"}', "😀 \ufffd! \ufffd"),
        (r'{"input": "\ud83d\u0041"}', "\ufffdA"),
        ('{"other": "a"}', '{"other": "a"}'),
        ("x" * 200, "x" * 200),
        ("", ""),
    ],
)
def test_what_is_no_input_stands_as_it_came(arguments: str, expected: str) -> None:
    assert read([arguments]) == read(list(arguments)) == expected


def test_calls_of_functions_are_left_alone() -> None:
    inputs = CustomInputs({"patch"})
    parts: list[Any] = [CallBegins(0, "id", "f"), CallArguments(0, "{}"), CallEnds(0)]
    assert [seen for part in parts for seen in inputs.read(part)] == parts


# ---- over HTTP -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _frontend(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    directory = tool_model.build(demo_model_dir, tmp_path_factory.mktemp("custom") / "model")
    with running_frontend(directory) as frontend:
        yield frontend


@pytest.fixture
def frontend(_frontend: Frontend) -> Frontend:
    wait_until(lambda: not _frontend.engine.running, what="an idle engine")
    _frontend.engine.reset()
    arguments = json.dumps({"input": '*** Begin\n+"a"\n*** End'})
    _frontend.answer(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>')
    return _frontend


def test_a_call_of_a_custom_tool(frontend: Frontend) -> None:
    body: dict[str, Any] = {"messages": ASKED, "tools": [custom(grammar=LARK)]}
    choice = frontend.chat(**body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "custom",
        "custom": {"name": "patch", "input": '*** Begin\n+"a"\n*** End'},
    }
    assert choice["finish_reason"] == "tool_calls"
    named = {"type": "custom", "custom": {"name": "patch"}}
    stream = frontend.chat(**body, tool_choice=named, stream=True).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    entries = [e for c in chunks for e in c["choices"][0]["delta"].get("tool_calls", ())]
    assert (entries[0]["type"], entries[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert {tuple(entry) for entry in entries[1:]} == {("index", "custom")}
    assert "".join(e["custom"]["input"] for e in entries) == call["custom"]["input"]
    rules = frontend.engine.submits[-1].rules
    assert rules is not None
    assert rules.grammar is not None


def test_history_and_definitions_reach_the_model_as_a_function(frontend: Frontend) -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a\n"b"'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
    ]
    assert frontend.chat(messages=messages, tools=[custom(grammar=LARK)]).status_code == 200
    prompt = prompt_text(frontend, frontend.engine.submits[-1])
    arguments = json.dumps({"input": 'a\n"b"'})
    assert f'{{"name": "patch", "arguments": {arguments}}}\n</tool_call>' in prompt
    shown = json.loads(prompt.splitlines()[1])
    assert shown["function"]["name"] == "patch"
    assert shown["function"]["description"] == "Changes files."
    assert LARK in shown["function"]["parameters"]["properties"]["input"]["description"]


@pytest.mark.parametrize(
    ("definition", "param"),
    [
        ({"type": "custom"}, "tools[0]"),
        (custom("no blanks"), "tools[0].custom.name"),
        (custom(grammar="start: nothing"), "tools[0].custom.format"),
        (custom(grammar="(", syntax="regex"), "tools[0].custom.format"),
        (custom(grammar="x", syntax="peg"), "tools[0].custom.format"),
        (custom(grammar="x" * (65 << 10), syntax="regex"), "tools[0].custom.format"),
        ({"type": "custom", "custom": {"name": "f", "format": {"type": "x"}}}, "tools[0].custom"),
        (
            {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}},
            "tools[0].custom.format",
        ),
    ],
)
def test_refusals(frontend: Frontend, definition: dict[str, Any], param: str) -> None:
    answer = frontend.chat(messages=ASKED, tools=[definition])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_a_call_in_history_is_of_one_kind(frontend: Frontend) -> None:
    both = {"function": {"name": "f"}, "custom": {"name": "g"}}
    for call in ({"id": "c"}, both):
        messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
        answer = frontend.chat(messages=messages)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function"
