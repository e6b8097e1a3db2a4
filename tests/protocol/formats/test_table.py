"""A model's format follows from its chat template."""

from __future__ import annotations

import json

import pytest

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
