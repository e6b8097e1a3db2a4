"""Recorded outputs of many families, where `canitoolcall` is installed (it is no dependency).

Its fixtures are read as tokens of a vocabulary that has each family's markers, whole and cut.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.formats.shapes import Format, Reasoning
from radixgrove.protocol.formats.table import FORMATS
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.output import OutputParser
from tests.worker.frontend.samples import Turn

canitoolcall = pytest.importorskip("canitoolcall", reason="a wheel that is tried by hand")
FIXTURES = Path(canitoolcall.__file__).parent / "_data" / "fixtures"
THINK = Reasoning("<think>", "</think>", ends_at_calls=True)
REASONING = {
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "gemma4": Reasoning("<|channel>thought\n", "<channel|>"),
    **dict.fromkeys(("deepseek", "glm", "kimi", "qwen3-hermes", "qwen3-xml"), THINK),
}
BY_FAMILY = {
    "gemma4": "gemma4",
    "glm": "glm",
    "gpt-oss": "gpt-oss",
    "kimi": "kimi-k2",
    "mistral": "mistral",
    "qwen3-hermes": "hermes",
    "qwen3-xml": "qwen3-coder",
}
BY_MODEL = {
    "DeepSeek-V3-0324": "deepseek-v3",
    "DeepSeek-V3.1": "deepseek-v3.1",
    "DeepSeek-V3.2": "deepseek-v3.2",
    "DeepSeek-V4-Flash": "deepseek-v4",
    "DeepSeek-V4.1-Flash": "deepseek-v4.1",
    "Llama-4": "llama4",
    "Llama": "llama3",
    "Kimi-K3": "kimi-k3",
}
# What a model cannot write under our grammars, which hold from a call's beginning on.
IMPOSSIBLE = {
    "deepseek/sglang-v4-self-closing-invoke",
    "glm/glm47-missing-last-close-arg-value",
    "kimi/k2i-vllm-noise-between-markers",
    "qwen3-xml/vllm-coder-missing-close-parameter",
    "qwen3-xml/bug-missing-close-parameter-before-function",
    "deepseek/vllm-v3-malformed-missing-brace",
    "qwen3-hermes/vllm-invalid-json-missing-brace",
}
# The first call of a list that was cut is whole.
LISTED = {"llama/l4-truncated-missing-close-bracket"}
# A call without what begins it is text.
UNMARKED = {
    "qwen3-xml/llamacpp-coder-bare-function",
    "qwen3-xml/llamacpp-coder-bare-function-parallel",
    "qwen3-xml/bug-coder-missing-tool-call-opener",
}
# Of a recipient that is no function of the request the text is content.
RECIPIENTS = {"gpt-oss/llamacpp-builtin-python-recipient"}
# The same text stands there as markers and as text, which only its tokens tell apart.
AMBIGUOUS = {"kimi/k3-control-marker-text-in-value"}
# Another family's markers.
FOREIGN = {"mistral/vllm-v11-think-text"}
OTHERS = IMPOSSIBLE | LISTED | UNMARKED | RECIPIENTS | AMBIGUOUS | FOREIGN


def fixtures() -> list[Any]:
    return [
        json.loads(line)
        for path in sorted(FIXTURES.glob("*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def form_of(fixture: Any) -> Format:
    family, model = fixture["family"], fixture["models"][0]
    name = next((name for key, name in BY_MODEL.items() if key in model), None)
    name = BY_FAMILY.get(family, "deepseek-v3") if name is None else name
    form = FORMATS[name]
    return replace(form, reasoning=form.reasoning or REASONING.get(family))


def prompt_of(fixture: Any) -> str:
    if fixture.get("generation_prompt") is not None:
        return str(fixture["generation_prompt"])
    family = json.loads((FIXTURES / fixture["family"] / "family.json").read_text())
    for model in family["reference_models"]:
        if model["repo"] == fixture["models"][0]:
            return str(model["default_generation_prompt"])
    return ""


def markers_of(fixture: Any, form: Format) -> Markers:
    family = json.loads((FIXTURES / fixture["family"] / "family.json").read_text())
    tokenizer = Tokenizer(models.BPE())
    known = [text for text in form.all_markers if text in family["markers"]]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in known])
    return Markers(form, tokenizer, ())


def types_of(parameters: Any) -> dict[str, frozenset[str]]:
    values = Values(parameters)
    return {name: values.types(part) for name, part in parameters.get("properties", {}).items()}


def turn_of(fixture: Any, form: Format, markers: Markers, pieces: list[str]) -> Turn:
    functions = [tool["function"] for tool in fixture["tools"]]
    offered = {f["name"]: types_of(f.get("parameters") or {}) for f in functions}
    thinks = form.reasoning is not None and prompt_of(fixture).rstrip().endswith(
        form.reasoning.markers[0]
    )
    parser = OutputParser(
        form,
        markers,
        offered=offered if functions else None,
        new_id=lambda name, number: str(number),
        in_reasoning=thinks,
    )
    turn = Turn()
    for piece in pieces:
        turn.add(parser.feed(piece))
    return turn.add(parser.finish())


def blank(text: str | None) -> str:
    return "".join((text or "").split())


@pytest.mark.parametrize("fixture", fixtures(), ids=lambda fixture: fixture["id"])
def test_a_recorded_output(fixture: Any) -> None:
    form = form_of(fixture)
    markers = markers_of(fixture, form)
    text = markers.inner(fixture["raw_output"])
    turn = turn_of(fixture, form, markers, [text])
    for size in (1, 2, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert turn_of(fixture, form, markers, pieces) == turn
    if fixture["id"] in OTHERS:
        pytest.xfail("see the lists above")
    cut = "truncated" in fixture["tags"]
    wanted = fixture.get("expected")
    if wanted is None:
        assert not turn.ended
        assert not turn.calls or cut
        return
    calls = [(call["name"], call["arguments"]) for call in wanted["tool_calls"]]
    assert turn.read == calls
    assert len(turn.calls) == len(calls) or cut  # what had begun stays begun
    if not cut:
        assert blank(turn.text) == blank(wanted["content"])
    assert blank(turn.reasoning) == blank(wanted["reasoning_content"])
