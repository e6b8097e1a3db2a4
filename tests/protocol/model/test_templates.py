"""Published chat templates render as they do in transformers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.parsing import parse_chat
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.protocol.text.templates import ChatTemplate
from tests.protocol.text.tokenizers_of_tests import llama_like

TEMPLATES: dict[str, str] = json.loads(Path(__file__).with_name("chat_templates.json").read_bytes())
SMOLVLM = "HuggingFaceTB/SmolVLM-Instruct"
TAKE_PARTS = {"Qwen/Qwen2-VL-7B-Instruct", SMOLVLM}
LIMITS = ModelLimits(max_model_len=1 << 20, vocab_size=1 << 20)
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "  What is 2 < 3?\n"},
    {"role": "assistant", "content": "True.", "reasoning_content": "Compare them."},
    {"role": "user", "content": "And 'é' & \"<b>\"?"},
]
CONVERSATIONS = {
    "one turn": TURNS[:1],
    "three turns": TURNS,
    "with a system message": [{"role": "system", "content": "Be brief. "}, *TURNS],
    "ending with an answer": TURNS[:2],
}
CHECKS = pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)


def encoder(source: str) -> PromptEncoder:
    return PromptEncoder(llama_like(source))


def ours(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = {"model": "m", "messages": messages, **fields}
    request = parse_chat(json.dumps(body).encode(), LIMITS)
    return encoder(source).renderer.render(request)


def theirs(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    rendered, _ = render_jinja_template(
        [copy.deepcopy(messages)],
        chat_template=source,
        **{"add_generation_prompt": True, **fields},
        **ENDS,
    )
    return rendered[0]


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, each content two parts."""
    return [
        message
        | {"content": [{"type": "text", "text": text} for text in (message["content"], "More.")]}
        for message in messages
    ]


def test_there_are_enough_of_them() -> None:
    assert len(TEMPLATES) >= 10


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
@CHECKS
def test_published_template(source: str, conversation: list[dict[str, Any]]) -> None:
    if source == TEMPLATES[SMOLVLM]:  # it takes parts alone
        conversation = as_parts(conversation)
    refusal = None
    try:
        expected = theirs(source, conversation)
    except jinja2.TemplateError as error:
        refusal = str(error)
    if refusal is None:
        assert ours(source, conversation) == expected
    else:
        with pytest.raises(ApiError, match=re.escape(refusal)):
            ours(source, conversation)


@pytest.mark.parametrize("model", sorted(TAKE_PARTS))
def test_a_template_that_takes_parts_gets_them(model: str) -> None:
    conversation = as_parts(TURNS)
    source = TEMPLATES[model]
    assert ours(source, conversation) == theirs(source, conversation)
    ending = conversation[:2]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert ours(source, ending, **continued) == theirs(source, ending, **continued)


@CHECKS
def test_templates_that_take_parts_are_told_from_those_that_do_not(source: str) -> None:
    takes = {TEMPLATES[model] for model in TAKE_PARTS}
    assert ChatTemplate(source, ENDS).takes_parts == (source in takes)


@pytest.mark.parametrize("model", sorted(TEMPLATES.keys() - TAKE_PARTS))
def test_other_templates_get_one_text(model: str) -> None:
    lines = [message | {"content": message["content"] + "\nMore."} for message in TURNS]
    source = TEMPLATES[model]
    assert ours(source, as_parts(TURNS)) == theirs(source, lines)


@pytest.mark.parametrize("end", ["True", "True "])
@CHECKS
def test_a_final_message_to_continue(source: str, end: str) -> None:
    if source == TEMPLATES[SMOLVLM]:
        pytest.skip("it takes parts alone")
    conversation = [*TURNS[:1], {"role": "assistant", "content": end}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert ours(source, conversation, **continued) == theirs(source, conversation, **continued)


def test_what_is_not_given_is_none() -> None:
    source = (
        "{% if tools is none and documents is none %}neither{% endif %}"
        "{% if tools is defined and documents is defined %}, both defined{% endif %}"
    )
    assert ours(source, TURNS) == theirs(source, TURNS) == "neither, both defined"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_reasoning_has_each_of_its_names(name: str) -> None:
    source = "{% for m in messages %}{{ m." + name + " or '' }}{% endfor %}"
    assert ours(source, TURNS) == theirs(source, TURNS) == "Compare them."


def test_ids_of_a_published_template(tmp_path: Any) -> None:
    """The whole way: template, special tokens, ids."""
    files = llama_like(TEMPLATES["mistralai/Mistral-7B-Instruct-v0.2"])
    (tmp_path / "tokenizer.json").write_bytes(files.contents["tokenizer.json"])
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **ENDS)
    reference.chat_template = TEMPLATES["mistralai/Mistral-7B-Instruct-v0.2"]
    expected = reference.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    body = json.dumps({"model": "m", "messages": TURNS, "add_generation_prompt": False})
    encoded = PromptEncoder(files).encode_chat(parse_chat(body.encode(), LIMITS))
    assert list(memoryview(encoded.token_ids).cast("i")) == expected


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"])
def test_tools_and_calls(model: str) -> None:
    """Definitions as they came, keys in their order; arguments as the object that they are."""
    tools = [
        {
            "type": "function",
            "function": {"parameters": {"type": "object"}, "name": "f", "description": "Größe"},
        }
    ]
    arguments = {"b": [1, "ü"], "a": None}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    conversation = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    written = copy.deepcopy(conversation)
    written[1]["content"] = None
    written[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    source = TEMPLATES[model]
    expected = theirs(source, conversation, tools=tools)
    assert ours(source, written, tools=tools) == expected
    assert '"name": "f"' in expected


def test_what_is_said_before_calls_joins_the_thoughts_where_a_template_refuses_both() -> None:
    """As gpt-oss's does."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
        "<{{ m.thinking or m.content }}>{{ m.tool_calls[0].function.name }} "
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}
    thinking = message | {"reasoning_content": "Which file?"}
    assert ours(source, [TURNS[0], thinking]) == "<Which file?\n\nI look it up.>f {}"
    assert ours(source, [TURNS[0], thinking | {"content": None}]) == "<Which file?>f {}"
    assert ours(source, [TURNS[0], message]) == "<I look it up.>f {}"
    both = source.replace("m.thinking or m.content", "m.thinking ~ '|' ~ m.content")
    both = both.replace("{{ raise_exception('not both') }}", "")
    assert ours(both, [TURNS[0], thinking]) == "<Which file?|I look it up.>f {}"


CALL_FORMS = {
    "an object": "{{ m.content }}|{{ c.function.name }} {{ c.function.arguments | tojson }}",
    "text": "{{ m.content }}|{{ c.function.name + ' ' + c.function.arguments }}",
    "an object, where the content is none": (
        "{% if m.content is none %}"
        "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endif %}"
    ),
    "text, where the content is none": (
        "{% if m.content is none %}{{ c.function.name + c.function.arguments }}{% endif %}"
    ),
}


@pytest.mark.parametrize("form", CALL_FORMS)
def test_calls_come_in_the_form_that_a_template_takes(form: str) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        + CALL_FORMS[form]
        + "{% endfor %}{% endfor %}"
    )
    call = {"id": "123456789", "type": "function"}
    arguments = {"a": "ü"}
    written = json.dumps(arguments, ensure_ascii=False)
    taken = written if "text" in form else arguments
    content = None if "none" in form else ""

    def conversation(content: str | None, arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        calls = [call | {"function": function}]
        return [TURNS[0], {"role": "assistant", "content": content, "tool_calls": calls}]

    expected = theirs(source, conversation(content, taken))
    assert "f" in expected
    for given in (None, ""):
        assert ours(source, conversation(given, written)) == expected
