"""The clients that people use: openai's and LangChain's."""

from __future__ import annotations

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from radixgrove.worker.messages import RefusalReason, Refused
from tests.worker.frontend.conftest import MODEL, Frontend


def langchain(frontend: Frontend, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, **options
    )


def test_openai_chat(frontend: Frontend) -> None:
    answer = frontend.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=["!"],
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "Hello"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id is not None


def test_openai_stream_helper_accumulates_one_role(frontend: Frontend) -> None:
    with frontend.openai().chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "Hello world"
    assert final.usage is not None
    assert final.usage.completion_tokens == 3


def test_openai_completions_and_models(frontend: Frontend) -> None:
    client = frontend.openai()
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    chunks = client.completions.create(model=MODEL, prompt="a", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert client.models.retrieve(MODEL).id == MODEL
    assert MODEL in [model.id for model in client.models.list()]


def test_openai_error_classes(frontend: Frontend) -> None:
    client = frontend.openai()
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=5)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=messages)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")
    frontend.engine.refuse = lambda submit: Refused(
        request_id=submit.request_id, reason=RefusalReason.QUEUE_FULL, detail="", retry_after=1
    )
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]


def test_openai_client_raises_when_the_engine_dies_in_mid_stream(start_frontend) -> None:  # type: ignore[no-untyped-def]
    frontend = start_frontend()
    frontend.answer("word " * 1000)
    frontend.engine.step_seconds = 0.02
    stream = frontend.openai().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    for _ in range(3):
        next(stream)
    frontend.engine.stop()
    with pytest.raises(openai.APIError, match="engine has stopped"):
        list(stream)


def test_langchain(frontend: Frontend) -> None:
    model = langchain(frontend)
    messages = [SystemMessage("be brief"), HumanMessage("hi")]
    answer = model.invoke(messages)
    assert answer.content == "Hello world"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3
    chunks = list(model.stream(messages, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == "Hello world"
    scored = langchain(frontend, logprobs=True).invoke(messages)
    assert scored.response_metadata["logprobs"]["content"][0]["token"] == "Hello"


def test_langchain_sees_the_context_overflow(frontend: Frontend) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        langchain(frontend).invoke("word " * 9000)
