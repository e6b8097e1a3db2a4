"""Whole answers and streams of both completion endpoints, as OpenAI's clients depend on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixgrove.protocol.settings import SamplingSource, WorkerSettings
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.messages import EngineInfo
from tests.conftest import wait_until
from tests.worker.frontend.conftest import ALIAS, MODEL, Frontend, StartFrontend, prompt_text

PIECES = "🌶️ ďábelské 👨‍👩‍👧 ภาษา, then plain words"


def events(response: httpx.Response) -> list[Any]:
    """The stream's events; `[DONE]` as a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    parts = []
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(
                    choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                )
    return "".join(parts)


def test_chat_answer(frontend: Frontend) -> None:
    frontend.engine.cached_tokens = 5
    body = frontend.chat("hi").json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 3  # two words and the end of the turn
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    (submit,) = frontend.engine.submits
    assert prompt_text(frontend, submit).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_stream_has_openais_order(frontend: Frontend) -> None:
    frontend.answer("Hello world")
    *chunks, done = events(frontend.chat("hi", stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *texts, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [chunk["choices"][0]["delta"] for chunk in texts] == [
        {"content": "Hello"},
        {"content": " world"},
    ]
    assert finish["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_stream_without_include_usage_has_no_usage(
    frontend: Frontend, options: dict[str, Any] | None
) -> None:
    *chunks, _ = events(frontend.chat("hi", stream=True, stream_options=options))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("whole", [False, True])
def test_every_chunk_has_the_usage_so_far_where_it_is_asked_for(
    frontend: Frontend, whole: bool
) -> None:
    frontend.engine.cached_tokens = 5
    options = {"continuous_usage_stats": True, "include_usage": whole}
    *chunks, _ = events(frontend.chat("hi", n=2, stream=True, stream_options=options))
    assert bool(chunks[-1]["choices"]) != whole
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert (counts[0], counts[-1]) == (0, 6)  # of both choices
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_scored_prompt_has_no_completion_in_its_usage(
    frontend: Frontend, logprobs: int | None
) -> None:
    asked = {"max_tokens": 0, "echo": True, "logprobs": logprobs}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(frontend.complete("hi", stream=True, stream_options=options, **asked))
    usages = [chunk["usage"] for chunk in chunks] + [
        frontend.complete("hi", **asked).json()["usage"]
    ]
    assert {usage["completion_tokens"] for usage in usages} == {0}


def test_completion_stream_equals_whole_answer(frontend: Frontend) -> None:
    frontend.answer(PIECES)
    whole = frontend.complete("x", max_tokens=100).json()
    chunks = events(frontend.complete("x", max_tokens=100, stream=True))
    assert whole["choices"][0]["text"] == PIECES == streamed_text(chunks)
    assert whole["object"] == chunks[0]["object"] == "text_completion"
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_stream_never_has_half_a_character(frontend: Frontend) -> None:
    frontend.answer(PIECES)
    chunks = events(frontend.chat("hi", stream=True))
    assert streamed_text(chunks) == PIECES
    for chunk in chunks[:-1]:
        assert "�" not in chunk["choices"][0]["delta"].get("content", "")


def test_prompt_ending_within_a_character_does_not_leak(frontend: Frontend) -> None:
    ids = frontend.tokenizer.encode("secret words 🌶").ids
    frontend.answer("new")
    body = frontend.complete(ids[:-1], max_tokens=10).json()
    assert body["choices"][0]["text"] == "new"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_several_tokens_never_shows(frontend: Frontend, stream: bool) -> None:
    frontend.answer("The quick brown fox jumps over the lazy dog")
    frontend.engine.step_seconds = 0.01
    response = frontend.chat("x", stop=["fox jumps"], stream=stream)
    if stream:
        chunks = events(response)
        assert streamed_text(chunks) == "The quick brown "
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == "The quick brown "
        assert choice["finish_reason"] == "stop"


def test_withheld_text_comes_when_no_stop_string_follows(frontend: Frontend) -> None:
    frontend.answer("The quick brown fox")
    chunks = events(frontend.chat("x", stop=["fox jumps"], stream=True))
    assert streamed_text(chunks) == "The quick brown fox"


def test_stop_string_can_stay_in_the_output(frontend: Frontend) -> None:
    frontend.answer("The quick brown fox")
    body = frontend.chat("x", stop="brown", include_stop_str_in_output=True).json()
    assert body["choices"][0]["message"]["content"] == "The quick brown"


def test_stop_token_ids_reach_the_engine_beside_eos(frontend: Frontend) -> None:
    (token,) = frontend.tokenizer.encode(" world").ids
    body = frontend.chat("x", stop_token_ids=[token]).json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert frontend.engine.submits[-1].sampling.stop_token_ids == (token, 2)
    frontend.chat("x", stop_token_ids=[token], ignore_eos=True)
    assert frontend.engine.submits[-1].sampling.stop_token_ids == (token,)


def test_length_is_the_finish_reason_of_a_cut_answer(frontend: Frontend) -> None:
    body = frontend.chat("x", max_tokens=5, max_completion_tokens=1).json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_separate_and_complete(frontend: Frontend, stream: bool) -> None:
    texts = ["first answer", "the second answer", "a third"]
    ids = [frontend.tokenizer.encode(text).ids for text in texts]
    frontend.engine.script = lambda submit: ids[int(submit.request_id.rpartition(":")[2])]
    frontend.engine.cached_tokens = 4
    response = frontend.chat("x", n=3, stream=stream, seed=7)
    if stream:
        chunks = events(response)
        assert [streamed_text(chunks, index) for index in range(3)] == texts
        roles = [
            choice["index"]
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            if "role" in choice["delta"]
        ]
        assert sorted(roles) == [0, 1, 2]
    else:
        body = response.json()
        assert [choice["message"]["content"] for choice in body["choices"]] == texts
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4  # once a prompt
    assert [submit.sampling.seed for submit in frontend.engine.submits] == [7, 8, 9]


def test_usage_sums_over_batched_prompts(frontend: Frontend) -> None:
    frontend.engine.cached_tokens = 3
    body = frontend.complete(["one two", "three four five"], max_tokens=8).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 6


def test_token_id_prompts(frontend: Frontend) -> None:
    one = frontend.complete([5, 6, 7], max_tokens=4)
    assert one.json()["usage"]["prompt_tokens"] == 3
    two = frontend.complete([[5, 6], [7]], max_tokens=4)
    assert len(two.json()["choices"]) == 2
    assert two.json()["usage"]["prompt_tokens"] == 3


def test_chat_logprobs(frontend: Frontend) -> None:
    body = frontend.chat("x", logprobs=True, top_logprobs=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " world"]
    assert "".join(bytes(entry["bytes"]).decode() for entry in content) == "Hello world"
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 3
    assert content[0]["top_logprobs"][0]["token"] == "Hello"
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0  # not -Infinity


def test_logprobs_of_tokens_that_are_parts_of_characters(frontend: Frontend) -> None:
    text = "hot 🌶 👨"
    frontend.answer(text)
    content = frontend.chat("x", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == text.encode()
    assert "�" not in str(content)
    parts = [entry for entry in content if "\\x" in entry["token"]]
    assert parts
    for entry in parts:
        escaped = bytes(entry["bytes"]).decode("utf-8", "backslashreplace")
        assert entry["token"] == escaped
    scores = frontend.complete("x", logprobs=2).json()["choices"][0]["logprobs"]
    expected = ["bytes:" + e["token"] if e in parts else e["token"] for e in content]
    assert scores["tokens"] == expected
    for token, alternatives in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert token in alternatives


def test_streamed_logprobs_equal_the_whole_answers(frontend: Frontend) -> None:
    frontend.answer("The quick brown fox jumps")
    whole = frontend.chat("x", logprobs=True, top_logprobs=2, stop=["brown bear"]).json()
    chunks = events(
        frontend.chat("x", logprobs=True, top_logprobs=2, stop=["brown bear"], stream=True)
    )
    streamed = [
        entry
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in streamed) == "The quick brown fox jumps"


def test_logprobs_end_before_the_stop_string(frontend: Frontend) -> None:
    frontend.answer("The quick brown fox")
    body = frontend.chat("x", logprobs=True, stop=[" brown"]).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["The", " quick"]


def test_completion_logprobs_and_echo(frontend: Frontend) -> None:
    body = frontend.complete("One two", logprobs=2, echo=True, max_tokens=8).json()
    (choice,) = body["choices"]
    assert choice["text"] == "One twoHello world"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["One", " two", "Hello", " world"]
    assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][1][" two"] == -0.5
    assert scores["text_offset"] == [0, 3, 7, 12]
    chunks = events(frontend.complete("One two", logprobs=2, echo=True, max_tokens=8, stream=True))
    assert streamed_text(chunks) == choice["text"]


def test_logprobs_of_a_prompt(frontend: Frontend) -> None:
    """Beside an echo with others too; the prefix cache has none of them."""
    body = frontend.complete("One two", prompt_logprobs=1, echo=True, logprobs=3, max_tokens=0)
    choice = body.json()["choices"][0]
    ids = frontend.tokenizer.encode("One two").ids
    decoded = frontend.tokenizer.decode(ids[1:2])
    own = {"logprob": -0.5, "rank": 1, "decoded_token": decoded}
    assert choice["prompt_logprobs"] == [None, {str(ids[1]): own}]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3
    alone = frontend.complete("One two", prompt_logprobs=0, echo=True, max_tokens=0)
    none = {"logprob": -0.5, "rank": None, "decoded_token": decoded}
    assert alone.json()["choices"][0]["prompt_logprobs"] == [None, {str(ids[1]): none}]
    assert alone.json()["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in frontend.complete("One two").json()["choices"][0]


def test_echo_of_the_prompt_alone(frontend: Frontend) -> None:
    plain = frontend.complete("One two", echo=True, max_tokens=0).json()
    assert plain["choices"][0]["text"] == "One two"
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == 0
    assert frontend.engine.submits == []
    scored = frontend.complete("One two", echo=True, max_tokens=0, logprobs=1).json()
    assert scored["choices"][0]["text"] == "One two"
    assert scored["choices"][0]["logprobs"]["tokens"] == ["One", " two"]
    assert scored["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids(frontend: Frontend, stream: bool) -> None:
    ids = [*frontend.tokenizer.encode("Hello world").ids, 2]
    response = frontend.complete([5, 6], return_token_ids=True, stream=stream)
    if stream:
        *chunks, _ = events(response)
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]
        got = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
        assert got == ids
    else:
        (choice,) = response.json()["choices"]
        assert choice["token_ids"] == ids
        assert choice["prompt_token_ids"] == [5, 6]


def test_service_tier_is_echoed_and_the_rest_ignored(frontend: Frontend) -> None:
    body = frontend.chat(
        "x",
        service_tier="flex",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        store=True,
        metadata={"a": "b"},
        verbosity="low",
        prediction={"type": "content", "content": "x"},
        something_new=[1, 2],
    ).json()
    assert body["service_tier"] == "flex"
    assert "service_tier" not in frontend.chat("x").json()


def test_a_small_pool_shortens_what_is_listed_and_taken(
    start_frontend: StartFrontend,
) -> None:
    frontend = start_frontend()
    frontend.engine.infos.put(
        EngineInfo(
            num_pages=64,
            page_size=16,
            max_model_len=1024,
            max_running=4,
            vocab_size=100,
            dtype="float32",
            device="cpu",
            weights_bytes=0,
            kv_bytes_per_token=1,
            attention_backend="torch",
            prefill_tokens_per_second=1000.0,
        )
    )

    def listed() -> int:
        with frontend.client() as client:
            return int(client.get("/v1/models").json()["data"][0]["max_model_len"])

    wait_until(lambda: listed() == 1024, what="the shorter length")
    refused = frontend.chat(max_tokens=1024)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "1024 tokens" in refused.json()["error"]["message"]


def test_models(frontend: Frontend) -> None:
    with frontend.client() as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [entry["id"] for entry in listed["data"]] == [MODEL, ALIAS]
        first = listed["data"][0]
        assert first["object"] == "model"
        assert first["max_model_len"] == 8192
        assert isinstance(first["created"], int)
        assert first["owned_by"]
        assert client.get(f"/v1/models/{MODEL}").json() == first  # an id with a slash
        head = client.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(client.get("/v1/models").content))
        missing = client.get("/v1/models/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


def test_alias_answers_under_its_own_name(frontend: Frontend) -> None:
    assert frontend.chat("x", model=ALIAS).json()["model"] == ALIAS


def test_extensions_reach_the_engine(frontend: Frontend) -> None:
    frontend.chat(
        "x",
        temperature=0.5,
        top_p=0.9,
        top_k=9_999_999,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"12": -100},
        min_tokens=2,
        priority=5,
        prefix_cache=False,
    )
    submit = frontend.engine.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert sampling.top_k == 49152  # clamped to the vocabulary
    assert sampling.repetition_penalty == 1.1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert sampling.logit_bias == {12: -100.0}
    assert sampling.min_tokens == 2
    assert submit.priority == 5
    assert submit.cache == "bypass"
    assert submit.domain == "local"


@pytest.mark.parametrize(("source", "temperature"), [("model", 0.25), ("openai", 1.0)])
def test_sampling_that_a_model_recommends(
    source: str, temperature: float, demo_model_dir: Path, tmp_path: Path
) -> None:
    for file in demo_model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    settings = WorkerSettings(sampling_defaults=SamplingSource(source))
    assert ServedModel.load(tmp_path, settings).limits.defaults.temperature == temperature
