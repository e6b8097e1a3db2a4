"""Tools through the router, with the demo model under a template that knows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import MODEL, UpProcess
from tests.worker.frontend.tool_model import TEMPLATE


class Visit(BaseModel):
    """Bounded on all sides, so that nonsense ends soon."""

    city: Literal["Paris", "Rome"]
    nights: Annotated[int, Field(ge=1, le=30)]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Visit, name="visit"),
    {"type": "function", "function": {"name": "now"}},
]
ASKED: list[Any] = [{"role": "user", "content": "Plan a trip. " * 40}]


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path
) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("tools")
    template = directory / "tools.jinja"
    template.write_text(TEMPLATE)
    up = UpProcess(directory / "log", ("--replicas", "1", "--chat-template", str(template)))
    try:
        up.start()
        yield openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", timeout=120, max_retries=0)
    finally:
        up.kill()


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def test_a_call_that_is_asked_for_comes_and_obeys(client: openai.OpenAI) -> None:
    """Of a small model that talks nonsense at this temperature."""
    for choice, finish in (
        ({"type": "function", "function": {"name": "visit"}}, "stop"),
        ("required", "tool_calls"),
    ):
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": ASKED,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 1.5,
            "seed": 7,
            "max_tokens": 200,
        }
        for answer in client.chat.completions.create(**body, n=3).choices:
            ((name, arguments),) = calls_of(answer.message)
            assert answer.finish_reason == finish
            assert name in ("visit", "now")
            if name == "visit":
                Visit.model_validate(arguments)
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**body).choices[0]
        assert calls_of(streamed.message) == calls_of(whole.message)
        assert streamed.finish_reason == whole.finish_reason == finish


def test_models_say_what_they_can(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.model_extra is not None
    assert model.model_extra["output_format"] == "hermes"
    expected = ["completions", "structured_output", "chat", "tools", "reasoning"]
    assert model.model_extra["capabilities"] == expected


def test_the_next_turn_finds_the_last_one_cached(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    first = client.chat.completions.create(**body, messages=ASKED, tool_choice="required")
    assert first.usage is not None
    message = first.choices[0].message.model_dump(exclude_none=True)
    calls = first.choices[0].message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": c.id, "content": "Booked."} for c in calls]
    second = client.chat.completions.create(
        **body, messages=[*ASKED, message, *results], tool_choice="none"
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= 0.95 * (first.usage.prompt_tokens - 16)
    assert second.choices[0].message.tool_calls is None


def test_tokenize_counts_what_a_completion_with_tools_does(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS}
    counted = client.post("../tokenize", body=body, cast_to=dict[str, Any])
    answer = client.chat.completions.create(**body, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"] == len(counted["tokens"])


def test_langchain_binds_tools(client: openai.OpenAI) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(
        model=MODEL,
        base_url=str(client.base_url),
        api_key=SecretStr("none"),
        temperature=1,
        max_completion_tokens=200,
    )
    answer: Any = model.bind_tools([Visit], tool_choice="any").invoke("Plan a trip.")
    assert {call["name"] for call in answer.tool_calls} == {"Visit"}
    for call in answer.tool_calls:
        Visit.model_validate(call["args"])
    chunks = list(model.bind_tools([Visit], tool_choice="Visit").stream("Plan a trip."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    ((name, arguments),) = [(c["name"], c["args"]) for c in whole.tool_calls]  # type: ignore[attr-defined]
    assert name == "Visit"
    Visit.model_validate(arguments)
    structured: Any = model.with_structured_output(Visit, method="function_calling")
    assert isinstance(structured.invoke("Plan a trip."), Visit)
