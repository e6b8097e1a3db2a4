"""Answers are made of events: whole and streamed, clients read the same."""

from __future__ import annotations

import json
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from radixgrove.protocol.openai.formats import ChatFormat, Choice, StreamEncoder, new_head
from radixgrove.protocol.openai.responses import Usage
from radixgrove.worker.frontend.answers import render
from radixgrove.worker.frontend.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Collected,
    Event,
    Finished,
    Reasoning,
    Text,
)

EVENTS: list[Event] = [
    Reasoning("Two "),
    Reasoning("cities."),
    Text("Let me "),
    Text("look."),
    CallBegins(0, "call_first0000", "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Paris"}'),
    CallEnds(0),
    CallBegins(1, "call_second000", "weather"),
    CallArguments(1, "{}"),
    CallEnds(1),
    Finished("tool_calls"),
]


def streamed(events: list[Event]) -> list[dict[str, Any]]:
    form = ChatFormat()
    head = new_head(form, stream=True, model="m", fingerprint="f", service_tier=None)
    encoder = StreamEncoder(head, form, include_usage=False)
    parts = [encoder.opening(0), *(render(encoder, 0, event, None, None) for event in events)]
    lines = b"".join(parts).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def whole(events: list[Event]) -> dict[str, Any]:
    form = ChatFormat()
    collected = Collected()
    for event in events:
        collected.add(event)
    choice = Choice(
        index=0,
        text="".join(collected.text),
        reasoning="".join(collected.reasoning),
        calls=collected.whole_calls(),
        finish_reason=collected.finish,
        logprobs=None,
        token_ids=[],
        prompt_token_ids=[],
    )
    head = new_head(form, stream=False, model="m", fingerprint="f", service_tier=None)
    answer: dict[str, Any] = json.loads(form.whole(head, [choice], Usage.of(1, 2, 0)))
    return answer


def test_a_client_adds_up_a_stream_to_the_whole() -> None:
    state = ChatCompletionStreamState()
    for chunk in streamed(EVENTS):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    added = state.get_final_completion().choices[0]
    answer = ChatCompletion.model_validate(whole(EVENTS)).choices[0]
    assert added.finish_reason == answer.finish_reason == "tool_calls"
    assert added.message.content == answer.message.content == "Let me look."
    calls = answer.message.tool_calls or []
    assert [call.model_dump() for call in calls] == [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        for name, arguments in (("first0000", '{"city": "Paris"}'), ("second000", "{}"))
    ]
    read = [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in added.message.tool_calls or []
    ]
    assert read == [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in calls
        if call.type == "function"
    ]
    for name in ("reasoning", "reasoning_content"):
        assert getattr(answer.message, name) == getattr(added.message, name) == "Two cities."


def test_a_delta_says_one_thing_and_names_come_once() -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(EVENTS)]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[-1] == {}
    kinds = [set(delta) - {"reasoning_content"} for delta in deltas[1:-1]]
    assert all(len(kind) == 1 for kind in kinds)
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    assert [entry["index"] for entry in entries] == [0, 0, 0, 1, 1]
    first = [entry for entry in entries if "id" in entry]
    assert [entry["function"] for entry in first] == [{"name": "weather", "arguments": ""}] * 2
    assert all(set(entry) == {"index", "function"} for entry in entries if entry not in first)


def test_content_beside_calls_is_null_where_there_is_none() -> None:
    message = whole([event for event in EVENTS if not isinstance(event, Text | Reasoning)])
    assert message["choices"][0]["message"]["content"] is None
    assert "reasoning" not in message["choices"][0]["message"]
