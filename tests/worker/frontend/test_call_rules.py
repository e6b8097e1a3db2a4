"""What a request's tools mean for its tokens where markers are made of several."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixgrove.protocol.formats.grammar import Extent
from radixgrove.protocol.formats.table import FORMATS
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.parsing import parse_chat
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.worker.frontend.call_rules import RulePlan, Thoughts, plan_rules
from tests.protocol.formats.test_grammar import EOS, vocabulary

TOKENIZER, _, MARKERS = vocabulary("kimi-k3")
OPEN, CLOSE, SEP = (MARKERS.ids[text] for text in ("<|open|>", "<|close|>", "<|sep|>"))
LIMITS = ModelLimits(max_model_len=4096, vocab_size=TOKENIZER.get_vocab_size())


def plan(thoughts: Thoughts, form: str = "kimi-k3", **fields: Any) -> RulePlan:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        **fields,
    }
    request = parse_chat(json.dumps(body).encode(), LIMITS)
    return plan_rules(request, FORMATS[form], MARKERS, thoughts, (EOS,), schemas=True)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_grammar_begins_behind_all_of_what_ends_reasoning(choice: str) -> None:
    found = plan(Thoughts.OPEN, tool_choice=choice)
    assert found.calls is not None
    assert found.calls.extent is {"auto": Extent.ANSWER, "required": Extent.CALLS}[choice]
    assert found.triggers == ()  # what begins calls begins an answer's text, too
    reasoning = found.reasoning
    assert reasoning is not None
    assert (reasoning.open, reasoning.end) == (True, CLOSE)
    assert reasoning.tail == (*TOKENIZER.encode("think").ids, SEP)
    assert set(reasoning.banned) == {OPEN, EOS}


def test_a_prompt_behind_reasoning_leaves_none() -> None:
    for thoughts in (Thoughts.NONE, Thoughts.CLOSED):
        found = plan(thoughts, tool_choice="required")
        assert found.reasoning is None
        assert found.calls is not None


def test_calls_alone_are_banned_not_what_begins_like_them() -> None:
    ((first, second),) = plan(Thoughts.NONE, tool_choice="none").banned
    assert (first, second) == (OPEN, TOKENIZER.encode("tools").ids[0])


def test_a_budget_that_cannot_be_held_is_refused_for_the_models_sake() -> None:
    with pytest.raises(ApiError) as caught:
        plan(Thoughts.OPEN, "gpt-oss", max_reasoning_tokens=5)
    assert (caught.value.status, caught.value.param) == (400, "max_reasoning_tokens")
    assert "this model writes reasoning" in caught.value.message
