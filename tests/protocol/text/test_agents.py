"""An agent's next turn begins with the tokens of the last one, which are cached then."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from radixgrove.protocol.openai.parsing import parse_chat
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from tests.worker.frontend.tool_model import MARKERS, TEMPLATE

LIMITS = ModelLimits(max_model_len=1 << 20, vocab_size=1 << 20)
PUBLISHED = Path(__file__).parents[1] / "model" / "chat_templates.json"
TEMPLATES = {"tests": TEMPLATE} | {
    name: source
    for name, source in json.loads(PUBLISHED.read_text()).items()
    if "tool_calls" in source
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": f"Does the work of kind {number}. " * 100,
            "parameters": {
                "type": "object",
                "properties": {
                    f"argument_{place}": {"type": "string", "description": "What it is. " * 8}
                    for place in range(8)
                },
                "required": ["argument_0"],
            },
        },
    }
    for number in range(9)
]


OPENING: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent that edits files. " * 200},
    {"role": "user", "content": "Mend the test, please."},
]


def called(number: int) -> list[dict[str, Any]]:
    """A tool call, and what it gave."""
    call = {
        "id": f"call_{number}abcde",
        "type": "function",
        "function": {"name": "tool_3", "arguments": '{"argument_0": "a \\"file\\""}'},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "def f():\n" * 50},
    ]


def encoder_of(demo: Path, template: str) -> PromptEncoder:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    markers = [*MARKERS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers])
    contents = dict(TokenizerFiles.load(demo).contents)
    contents["tokenizer.json"] = tokenizer.to_str().encode()
    contents["chat_template.jinja"] = template.encode()
    return PromptEncoder(TokenizerFiles(contents))


def ids_of(encoder: PromptEncoder, messages: list[dict[str, Any]]) -> list[int]:
    body = {"model": "m", "messages": messages, "tools": TOOLS}
    request = parse_chat(json.dumps(body).encode(), LIMITS)
    return array("i", encoder.encode_chat(request).token_ids).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_second_turn_of_an_agent_reuses_the_first(demo_model_dir: Path, name: str) -> None:
    encoder = encoder_of(demo_model_dir, TEMPLATES[name])
    assert len(json.dumps([OPENING, TOOLS])) > 40_000
    turn = OPENING
    first = ids_of(encoder, turn)
    for number in range(3):
        turn = [*turn, *called(number)]
        second = ids_of(encoder, turn)
        common = next(
            (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        assert common >= 0.95 * len(first)
        first = second
