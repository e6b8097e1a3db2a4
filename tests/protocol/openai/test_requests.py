"""What a parsed request promises. (Refusals are tested through HTTP, in tests/frontend.)"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.openai.decoding import peek_model, with_model
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.parsing import parse_chat, parse_completion
from radixgrove.protocol.openai.requests import ChatRequest, CompletionRequest, ModelLimits
from radixgrove.protocol.openai.sampling import SamplingDefaults

LIMITS = ModelLimits(max_model_len=100, vocab_size=1000)


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode(), LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), LIMITS)


def test_the_model_is_known_before_the_rest_is_checked() -> None:
    assert peek_model(b'{"messages": 5, "model": "a/b"}') == "a/b"
    for body in (b"{}", b"[]", b"", b'{"model": null}', b'{"model": 1}'):
        with pytest.raises(ApiError):
            peek_model(body)


def test_another_model_takes_the_place_of_the_one_that_was_asked_for() -> None:
    body = b'{"model": "a", "n": 1e2, "x": {"model": "a"}, "model": "b/c", "y": "\\u00fc"}'
    changed = with_model(body, "served")
    assert json.loads(changed) == {"model": "served", "n": 1e2, "x": {"model": "a"}, "y": "ü"}
    assert b"1e2" in changed, "what is not read stays as it was written"


def test_what_a_request_leaves_out_is_what_the_model_recommends() -> None:
    recommended = SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05
    )
    limits = msgspec.structs.replace(LIMITS, defaults=recommended)

    def drawn(**fields: Any) -> SamplingDefaults:
        body = {"model": "m", "prompt": "x", **fields}
        sampling = parse_completion(json.dumps(body).encode(), limits).generation.sampling
        names = SamplingDefaults.__struct_fields__
        return SamplingDefaults(**{name: getattr(sampling, name) for name in names})

    assert drawn() == drawn(temperature=None, top_k=None) == recommended
    assert drawn(temperature=0, top_k=-1) == msgspec.structs.replace(
        recommended, temperature=0.0, top_k=0
    )
    usual = SamplingDefaults()
    assert drawn(**msgspec.structs.asdict(usual)) == usual


def test_max_tokens_is_what_fits() -> None:
    assert chat().generation.max_tokens_for(40, LIMITS) == 60
    assert chat(max_tokens=10).generation.max_tokens_for(90, LIMITS) == 10
    for request, prompt in ((chat(max_tokens=11), 90), (chat(), 100), (chat(), 5000)):
        with pytest.raises(ApiError) as error:
            request.generation.max_tokens_for(prompt, LIMITS)
        assert error.value.code == "context_length_exceeded"


def test_a_prompt_that_is_scored_leaves_room_for_the_token_behind_it() -> None:
    shown = completion(echo=True, max_tokens=0).generation
    assert (shown.length_for(100), shown.max_tokens_for(100, LIMITS)) == (100, 0)
    scored = completion(echo=True, max_tokens=0, logprobs=1).generation
    assert (scored.length_for(99), scored.max_tokens_for(99, LIMITS)) == (100, 1)
    with pytest.raises(ApiError):
        scored.max_tokens_for(100, LIMITS)


def test_whole_numbers_may_have_a_point() -> None:
    """As Lua, MATLAB and spreadsheets write them."""
    body = b'{"model": "m", "prompt": "x", "max_tokens": 16.0, "n": 2.00, "temperature": 1.0}'
    generation = parse_completion(body, LIMITS).generation
    assert (generation.max_tokens, generation.n) == (16, 2)
    for number in ("16.5", "1e1", "-1.0", "16.0, x", "16.0, " + '"x": ' + "[" * 100_000):
        with pytest.raises(ApiError) as refused:
            parse_completion(body.replace(b"16.0", number.encode()), LIMITS)
        assert refused.value.param == "max_tokens"


def test_every_sequence_has_a_seed_of_its_own() -> None:
    generation = chat(seed=-1, n=3).generation
    seeds = [generation.sampling_for(5, number, ()).seed for number in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    drawn = {chat().generation.sampling.seed for _ in range(10)}
    assert len(drawn) == 10


def test_stop_tokens_are_the_clients_and_the_models() -> None:
    generation = chat(stop_token_ids=[5, 2]).generation
    assert generation.sampling_for(5, 0, (2, 7)).stop_token_ids == (5, 2, 7)
    ignoring = chat(stop_token_ids=[5], ignore_eos=True).generation
    assert ignoring.sampling_for(5, 0, (2, 7)).stop_token_ids == (5,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = [
    *("model", "messages", "prompt", "n", "stop", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("logit_bias", "max_tokens", "stream", "stream_options", "logprobs", "top_logprobs", "echo"),
    *("tools", "response_format", "stop_token_ids", "chat_template_kwargs", "best_of", "priority"),
    "prompt_logprobs",
]


@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    """Bounds hold for all that is accepted; nothing but an ApiError is ever raised."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    for parse in (parse_chat, parse_completion):
        try:
            request = parse(json.dumps(body).encode(), LIMITS)
        except ApiError:
            continue
        sampling = request.generation.sampling
        assert 1 <= request.generation.n <= 128
        assert 0 <= sampling.temperature <= 2
        assert 0 < sampling.top_p <= 1
        assert 0 <= sampling.top_k <= LIMITS.vocab_size
        assert all(0 <= token < LIMITS.vocab_size for token in sampling.logit_bias)
        assert all(0 <= token < LIMITS.vocab_size for token in sampling.stop_token_ids)
        assert len(request.generation.stop) <= 4


@pytest.mark.parametrize(
    "rest",
    [
        rb'b and much more than half of a pair"}',
        rb'\n"}',
        rb'"}',
        rb'", "stream": false, "max_tokens": 100}',
        rb'\ud83d\ude00 then a whole one"}',
    ],
)
def test_half_of_a_character_is_shown_to_the_client(rest: bytes) -> None:
    """As JavaScript writes a text that was cut within an emoji."""
    body = rb'{"model": "m", "prompt": "cut: \ud83d' + rest
    with pytest.raises(ApiError, match="half of a surrogate pair") as refused:
        parse_completion(body, LIMITS)
    assert r"'\ud83d'" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "m", "prompt": "\ud83d\ude00',
        b'{"model": "m", "prompt": "\\ud83d\\ude00\x01"}',
        rb'{"model": "m", "prompt": "\uzzzz"}',
    ],
)
def test_other_damage_is_not_blamed_on_a_whole_pair(body: bytes) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_completion(body, LIMITS)
