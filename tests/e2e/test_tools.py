"""Tools through the router, with the demo model under a template that knows them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
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
def up(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[UpProcess]:
    directory = tmp_path_factory.mktemp("tools")
    template = directory / "tools.jinja"
    template.write_text(TEMPLATE)
    up = UpProcess(directory / "log", ("--replicas", "1", "--chat-template", str(template)))
    try:
        up.start()
        yield up
    finally:
        up.kill()


@pytest.fixture(scope="module")
def client(up: UpProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", timeout=120, max_retries=0)


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
        seed=7,
        max_completion_tokens=400,  # blanks between JSON's tokens are tokens, too
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


def test_openai_agents(client: openai.OpenAI) -> None:
    import agents

    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(
        MODEL, openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)
    )
    booked: list[Visit] = []

    @agents.function_tool
    def visit(city: Literal["Paris", "Rome"], nights: Annotated[int, Field(ge=1, le=30)]) -> str:
        """Books a visit."""
        booked.append(Visit(city=city, nights=nights))
        return "Booked."

    booking: Any = agents.Agent(
        name="Booking",
        model=model,
        tools=[visit],
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=200
        ),
        tool_use_behavior="stop_on_first_tool",
    )
    planning: Any = agents.Agent(
        name="Planning",
        model=model,
        output_type=Visit,
        model_settings=agents.ModelSettings(max_tokens=200),
    )

    async def run() -> None:  # in one event loop, to which its client is bound
        answer = await agents.Runner.run(booking, "Plan a trip.")
        assert answer.final_output == "Booked."
        assert len(booked) == 1
        running = agents.Runner.run_streamed(booking, "Plan a trip.")
        async for _ in running.stream_events():
            pass
        assert running.final_output == "Booked."
        assert len(booked) == 2
        planned = await agents.Runner.run(planning, "Plan a trip.")
        assert isinstance(planned.final_output, Visit)

    asyncio.run(run())


def test_pydantic_ai(client: openai.OpenAI) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=str(client.base_url), api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    settings: Any = {"max_tokens": 200}

    async def run() -> None:
        for output in (Visit, pydantic_ai.NativeOutput(Visit)):
            agent: Any = pydantic_ai.Agent(model, output_type=output, model_settings=settings)
            answer = await agent.run("Plan a trip.")
            assert isinstance(answer.output, Visit)
            assert answer.usage.output_tokens > 0
            async with agent.run_stream("Plan a trip.") as running:
                assert isinstance(await running.get_output(), Visit)

    asyncio.run(run())


def test_litellm(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    import litellm

    body: dict[str, Any] = {
        **{"model": f"openai/{MODEL}", "api_base": str(client.base_url), "api_key": "none"},
        **{"messages": ASKED, "max_tokens": 200, "seed": 5},
    }
    called = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    whole: Any = litellm.completion(**body, **called)
    ((name, arguments),) = calls_of(whole.choices[0].message)
    assert name == "visit"
    Visit.model_validate(arguments)
    assert whole.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(**body, **called, stream=True))
    streamed: Any = litellm.stream_chunk_builder(chunks)
    assert calls_of(streamed.choices[0].message) == [(name, arguments)]
    text: Any = litellm.completion(**body, response_format=Visit)
    Visit.model_validate_json(text.choices[0].message.content)


def test_a_replica_that_dies_within_a_call_completes_none(up: UpProcess) -> None:
    """The last test of this file: the cluster has no other replica."""
    text = {"type": "string", "minLength": 4000}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    body = {
        "model": MODEL,
        "messages": ASKED,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": parameters}}],
        "tool_choice": "required",
        "stream": True,
    }
    arguments, reasons, errors, done, killed = "", set(), [], False, False
    with (
        contextlib.suppress(httpx.RemoteProtocolError),  # the connection ends behind the error
        httpx.stream(
            "POST", f"{up.url}/v1/chat/completions", json=body, timeout=60, verify=False
        ) as answer,
    ):
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            done |= data == "[DONE]"
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            errors += [event["error"]] if "error" in event else []
            for choice in event.get("choices", ()):
                reasons.add(choice["finish_reason"])
                for call in choice["delta"].get("tool_calls", ()):
                    arguments += call["function"]["arguments"]
            if len(arguments) > 20 and not killed:
                up.find("radixgrove.worker.engine.loop").kill()
                killed = True
    assert killed
    assert len(arguments) < 4000
    assert len(errors) == 1
    assert reasons == {None}
    assert not done
