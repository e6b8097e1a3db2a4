"""From request bodies to validated, bounded requests: the same code in router and worker.

`parse_chat` and `parse_completion` raise `ApiError` (400, 404) that names the parameter.
"""

from __future__ import annotations

import secrets
from operator import attrgetter

import msgspec

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    MAX_BIAS,
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Neutral,
    StreamOptions,
)
from radixgrove.protocol.openai.decoding import (
    bias_out_of_bounds,
    decode,
    refuse_unsupported,
    require_model,
)
from radixgrove.protocol.openai.inputs import checked_messages, checked_prompts, valid_token_ids
from radixgrove.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Generation,
    ModelLimits,
)
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.openai.structured import parse_constraint
from radixgrove.protocol.openai.tools import parse_tools

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for text completions

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


class _Unsupported:
    """Fields of one kind of body that ask for something this server does not do."""

    def __init__(self, table: Neutral) -> None:
        self._table = table
        self._values = attrgetter(*table)
        self._absent = (None,) * len(table)

    def refuse(self, wire: GenerationBody) -> None:
        """Raises ApiError that names the first of them."""
        if self._values(wire) == self._absent:  # as of most bodies
            return
        refuse_unsupported(wire, self._table)


_chat_unsupported = _Unsupported(CHAT_NEUTRAL)
_completion_unsupported = _Unsupported(COMPLETION_NEUTRAL)


def parse_chat(body: bytes, limits: ModelLimits) -> ChatRequest:
    """Read the body of `POST /v1/chat/completions`.

    Raises:
        ApiError: 400, naming the parameter.
    """
    return checked_chat(decode(_chat_decoder, body), limits)


def checked_chat(wire: ChatBody, limits: ModelLimits) -> ChatRequest:
    """A chat body as a request.

    Raises:
        ApiError: 400, naming the parameter.
    """
    model = require_model(wire.model)
    messages = checked_messages(wire.messages)
    _chat_unsupported.refuse(wire)
    if wire.top_logprobs and not wire.logprobs:
        raise errors.invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    max_tokens = wire.max_completion_tokens
    param = "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = wire.max_tokens, "max_tokens"
    if max_tokens == 0:
        raise errors.invalid(f"'{param}' must be at least 1.", param)
    if wire.best_of is not None and wire.best_of != (wire.n or 1):
        raise errors.unsupported("best_of", "'best_of' is supported for text completions only.")
    continues = bool(wire.continue_final_message)
    if continues and wire.add_generation_prompt:
        raise errors.invalid(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            "continue_final_message",
        )
    generation = _generation(
        wire,
        limits,
        max_tokens=max_tokens,
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        prompt_param="messages",
    )
    kwargs = dict(wire.chat_template_kwargs or {})
    if wire.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", wire.reasoning_effort)
    return ChatRequest(
        model=model,
        messages=messages,
        generation=generation,
        template_kwargs=kwargs,
        add_generation_prompt=not continues and wire.add_generation_prompt is not False,
        continue_final_message=continues,
        tools=parse_tools(wire),
        include_reasoning=wire.include_reasoning is not False,
        max_reasoning_tokens=wire.max_reasoning_tokens,
    )


def parse_completion(body: bytes, limits: ModelLimits) -> CompletionRequest:
    """Read the body of `POST /v1/completions`.

    Raises:
        ApiError: 400, naming the parameter.
    """
    wire = decode(_completion_decoder, body)
    model = require_model(wire.model)
    prompts = checked_prompts(wire.prompt, limits)
    _completion_unsupported.refuse(wire)
    echo = bool(wire.echo)
    max_tokens = DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
    if max_tokens == 0 and not echo:
        raise errors.invalid("'max_tokens' must be at least 1 without 'echo'.", "max_tokens")
    generation = _generation(
        wire,
        limits,
        max_tokens=max_tokens,
        logprobs=wire.logprobs,
        echoed_logprobs=wire.logprobs if echo else None,
        best_of=wire.best_of,
        prompt_param="prompt",
    )
    if generation.n * len(prompts) > MAX_SEQUENCES:
        raise errors.invalid(
            f"'n', or 'best_of', times the number of prompts must be at most {MAX_SEQUENCES}.",
            "prompt",
        )
    return CompletionRequest(
        model=model,
        prompts=prompts,
        generation=generation,
        echo=echo,
        special=wire.add_special_tokens is not False,
    )


def _generation(
    wire: GenerationBody,
    limits: ModelLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_param: str,
    echoed_logprobs: int | None = None,
    best_of: int | None = None,
) -> Generation:
    stream = bool(wire.stream)
    if wire.stream_options is not None and not stream:
        raise errors.invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    if wire.prompt_logprobs is not None and stream:
        raise errors.invalid("'prompt_logprobs' is not there in streams.", "prompt_logprobs")
    shown = wire.n or 1
    n = _sequences(best_of, shown, stream=stream)
    scored_prompt = [k for k in (echoed_logprobs, wire.prompt_logprobs) if k is not None]
    sampling = _sampling(
        wire,
        limits,
        max_tokens,
        logprobs=0 if logprobs is None and n > shown else logprobs,  # the best is chosen by them
        prompt_logprobs=max(scored_prompt, default=None),
    )
    stop = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    options = wire.stream_options or StreamOptions()
    return Generation(
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        shown=shown,
        shows_logprobs=logprobs is not None,
        prompt_logprobs=wire.prompt_logprobs,
        stop=stop,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        ignore_eos=bool(wire.ignore_eos),
        include_stop=bool(wire.include_stop_str_in_output),
        skip_special_tokens=wire.skip_special_tokens is not False,
        priority=wire.priority or 0,
        prefix_cache=wire.prefix_cache is not False,
        cache_salt=wire.cache_salt,
        return_token_ids=bool(wire.return_token_ids),
        service_tier=wire.service_tier[:64] if isinstance(wire.service_tier, str) else None,
        prompt_param=prompt_param,
        constraint=parse_constraint(wire),
        allowed_token_ids=_allowed_ids(wire.allowed_token_ids, limits.vocab_size),
        bad_words=tuple(wire.bad_words or ()),
    )


def _sampling(
    wire: GenerationBody,
    limits: ModelLimits,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    min_tokens = wire.min_tokens or 0
    if min_tokens > (limits.max_model_len if max_tokens is None else max_tokens):
        raise errors.invalid("'min_tokens' must not exceed the tokens to generate.", "min_tokens")
    defaults = limits.defaults
    return SamplingParams(
        max_tokens=max_tokens or 1,
        seed=secrets.randbits(63) if wire.seed is None else wire.seed % (1 << 63),
        temperature=_or(wire.temperature, defaults.temperature) + 0.0,  # -0.0 becomes 0.0
        top_p=_or(wire.top_p, defaults.top_p) or 1.0,
        top_k=_top_k(wire, limits),
        min_p=_or(wire.min_p, defaults.min_p),
        repetition_penalty=_or(wire.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(wire.presence_penalty, 0.0),
        frequency_penalty=_or(wire.frequency_penalty, 0.0),
        logit_bias=_logit_bias(wire.logit_bias or {}, limits.vocab_size),
        min_tokens=min_tokens,
        stop_token_ids=tuple(
            valid_token_ids(wire.stop_token_ids or [], "stop_token_ids", limits.vocab_size)
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _sequences(best_of: int | None, shown: int, *, stream: bool) -> int:
    """How many choices are generated to show that many."""
    if best_of is None:
        return shown
    if best_of < shown:
        raise errors.invalid("'best_of' must not be less than 'n'.", "best_of")
    if best_of > shown and stream:
        raise errors.invalid("'best_of' more than 'n' needs 'stream' to be false.", "best_of")
    return best_of


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _top_k(wire: GenerationBody, limits: ModelLimits) -> int:
    """0 is off; an empty nucleus (`top_p: 0`) means the most probable token alone."""
    if wire.top_p == 0:
        return 1
    top_k = limits.defaults.top_k if wire.top_k is None else wire.top_k
    return min(max(top_k, 0), limits.vocab_size)


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise errors.invalid(
                f"The key '{errors.shorten(key, 32)}' of 'logit_bias' is no token id from 0 to "
                f"{vocab_size - 1}.",
                "logit_bias",
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise bias_out_of_bounds(key)
        bias[int(key)] = value
    return bias


def _allowed_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise errors.invalid("'allowed_token_ids' must not be empty.", "allowed_token_ids")
    return tuple(dict.fromkeys(valid_token_ids(ids, "allowed_token_ids", vocab_size)))
