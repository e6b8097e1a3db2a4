"""A model's format follows from its chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from radixgrove.protocol.formats.shapes import Calls, JsonBody, Reasoning
from radixgrove.protocol.formats.table import FORMATS, UnknownFormatError, choose_format
from tests.checkout import ROOT

PUBLISHED = json.loads((ROOT / "tests/protocol/model/chat_templates.json").read_text())
KNOWN = {
    "Qwen/Qwen2.5-7B-Instruct": "hermes (no reasoning)",
    "Qwen/Qwen3-8B": "none (reasoning in <think>)",  # the file has it without its tools
    "meta-llama/Llama-3.1-8B-Instruct": "llama3 (no reasoning)",
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_templates(model: str) -> None:
    assert str(choose_format(PUBLISHED[model])) == KNOWN.get(model, "none (no reasoning)")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=", "qwen3-coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("[TOOL_CALLS][", "mistral-list"),
        ("<｜tool▁calls▁begin｜>function\n```json", "deepseek-v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3.1"),
        ("<｜DSML｜function_calls>", "deepseek-v3.2"),
        ("<｜DSML｜tool_calls>", "deepseek-v4"),
        ("<|tool_calls_section_begin|>", "kimi-k2"),
        ("<|open|>message role={{ role }}<|sep|>", "kimi-k3"),
        ("<|channel|>final<|message|>", "gpt-oss"),
        ("<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("<|tool_call_start|>", "lfm2"),
        ("<|tool_call|>[", "granite"),
        ("<|tool_call|>[]<|/tool_call|>", "phi4"),
    ],
)
def test_what_templates_say(template: str, name: str) -> None:
    assert choose_format(template).name == name


def test_reasoning_is_known_by_its_markers() -> None:
    for text, begin in (("</think>", "<think>"), ("[/THINK]", "[THINK]"), ("", None)):
        reasoning = choose_format(f"<tool_call>{text}").reasoning
        assert (None if reasoning is None else reasoning.begin) == begin


def test_a_name_overrides_the_template() -> None:
    template = PUBLISHED["Qwen/Qwen3-8B"]
    for name in FORMATS:
        assert choose_format(template, name).name == name
    assert choose_format(template, "none").calls is None
    assert choose_format(template, "none").reasoning is None
    with pytest.raises(UnknownFormatError, match="hermes"):
        choose_format(template, "homer")


# ---- what a checkpoint itself says -----------------------------------------------------------

THOUGHTS = {"open": "<think>\n", "close": "</think>", "content": "text"}
CALL = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


def described(**fields: Any) -> Any:
    return {"start_anchor": "<|im_start|>assistant\n", "fields": fields}


def test_a_checkpoint_describes_its_calls_and_reasoning() -> None:
    spec = described(thinking=THOUGHTS, tool_calls=CALL, content={"content": "text"})
    assert choose_format("no markers", "auto", spec) == replace(
        FORMATS["hermes"], reasoning=Reasoning("<think>\n", "</think>", ends_at_calls=True)
    )
    own = CALL | {
        "open_pattern": r"<\|call\|>\s*",
        "close": "<|end|>",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    }
    form = choose_format("<tool_call>", "auto", described(tool_calls=own))
    assert form.name == "response_template"
    assert form.calls == Calls(JsonBody("parameters"), call=("<|call|>", "<|end|>"))
    each = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
    listed = own | {"transform": each, "transform_each": True}
    body = choose_format("", "auto", described(tool_calls=listed)).calls
    assert body == Calls(JsonBody(listed=True), call=("<|call|>", "<|end|>"))
    python = {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "repeats": True}
    python["content"] = "python-call-list"
    assert choose_format("", "auto", described(tool_calls=python)).name == "lfm2"


def test_a_name_goes_before_what_the_checkpoint_says() -> None:
    assert choose_format("", "glm", described(tool_calls=CALL)).name == "glm"
    assert choose_format("", "none", described(tool_calls=CALL)).calls is None


@pytest.mark.parametrize(
    "spec",
    [
        None,
        "text",
        {"fields": []},
        {"version": 2} | described(tool_calls=CALL),
        described(tool_calls=CALL | {"content": "xml-inline"}),
        described(tool_calls=CALL | {"content_args": {"unquoted_keys": True}}),
        described(tool_calls=CALL | {"open_pattern": r"<tool_call>|<call>"}),
        described(tool_calls=CALL | {"transform": {"function": "{name}"}}),
        described(tool_calls={"content": "json"}),
        described(tool_calls=5, thinking={"open": ["<a>", "<b>"], "close": "</a>"}),
    ],
)
def test_what_has_no_like_here_is_left_to_the_table(spec: Any) -> None:
    assert choose_format("[TOOL_CALLS][", "auto", spec) == FORMATS["mistral-list"]
