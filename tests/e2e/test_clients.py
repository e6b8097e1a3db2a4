"""The clients that people use, against the routed endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import MODEL, UpProcess, chat_body, wait_idle

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(cluster: UpProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120, max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Count from one to ten, in emoji and words."}
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=40
    )
    text, usage, finishes = "", None, []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_cached_tokens_on_the_second_turn(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You answer briefly. " * 20},
        {"role": "user", "content": "Name a colour."},
    ]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    content = first.choices[0].message.content
    assert content
    messages += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": "Name another."},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens // 16 * 16 - 16
    assert cached > 0


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the best
        assert entry.logprob <= 0


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=3, temperature=1.0, seed=5, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=3, temperature=1.0, seed=5, max_tokens=12
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def test_stop_string_over_token_borders(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24, stop=["nce is P"]
    )
    assert answer.choices[0].message.content == "The capital of Fra"
    assert answer.choices[0].finish_reason == "stop"


def test_completions_echo_and_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, echo=True
    )
    assert answer.choices[0].text.startswith("One, two,")
    assert answer.choices[1].text.startswith("Red, green,")


@pytest.mark.parametrize(
    ("changes", "status", "parameter"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"logit_bias": {"191222": -100}}, 400, "logit_bias"),
        ({"model": "no-such-model"}, 404, "model"),
    ],
)
def test_errors(
    client: openai.OpenAI, changes: dict[str, Any], status: int, parameter: str
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 4} | changes
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**arguments)
    assert raised.value.status_code == status
    assert raised.value.param == parameter


def test_context_overflow(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 6000}]
        )
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in raised.value.message


def test_langchain(cluster: UpProcess) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{cluster.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=24,
    )
    question = "What is the capital of France?"
    whole = model.invoke(question)
    assert whole.content == "The capital of France is Paris."
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(str(chunk.content) for chunk in model.stream(question)) == whole.content


def test_disconnect_frees_the_replica(cluster: UpProcess) -> None:
    """Closed after the first bytes: both the router and the worker let go at once."""
    wait_idle(cluster)
    body = chat_body("Write a very long story.", max_tokens=1500, stream=True, ignore_eos=True)
    with httpx.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    wait_idle(cluster, deadline=5)


def test_request_id_travels(cluster: UpProcess) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat_body("Hi", max_tokens=2),
        headers={"x-request-id": "from-the-client-1"},
        timeout=60,
    )
    assert answer.headers["x-request-id"] == "from-the-client-1"
    assert answer.status_code == 200


def test_ctrl_c_leaves_nothing(demo_model_dir: Path, tmp_path: Path) -> None:
    up = UpProcess(tmp_path / "log", ("--replicas", "1"))
    try:
        up.start()
        up.stop()
    finally:
        up.kill()
