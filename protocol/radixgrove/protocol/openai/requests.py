"""From request bodies to validated, bounded requests: the same code in router and worker.

`parse_chat` and `parse_completion` raise `ApiError` (400, 404) that names the parameter. Nothing
they return needs checking again, except what depends on the prompt's length in tokens
(`Generation.max_tokens_for`) and on the chat template (`prompts`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from radixgrove.protocol.constraints.constraint import Constraint
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    MAX_BIAS,
    MAX_SEQUENCES,
    MESSAGE_UNSUPPORTED,
    PART_TYPES,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Neutral,
    StreamOptions,
)
from radixgrove.protocol.openai.sampling import SamplingDefaults, SamplingParams
from radixgrove.protocol.openai.structured import parse_constraint
from radixgrove.protocol.openai.tools import Tools, parse_tools

ENVELOPE_TYPE = "application/vnd.radixgrove+msgpack"
INTERNAL_KEY_HEADER = "x-radixgrove-key"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for text completions
ROLES = ("system", "developer", "user", "assistant", "tool")


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request to one model is checked against."""

    max_model_len: int  # prompt and completion together, in tokens
    vocab_size: int  # ids of every id-valued field are below it
    defaults: SamplingDefaults = SamplingDefaults()  # for what the request leaves out


class Envelope(msgspec.Struct, kw_only=True):
    """A router's request to a worker: the client's body and what the router already knows.

    Accepted only with the internal key, since it carries the principal.
    """

    body: bytes  # the client's JSON, under a name that the worker serves
    prompts: list[bytes]  # token ids of each prompt, int32 little-endian
    principal: str
    # Unique, made by the router: the engine's ids are `<request_id>:<sequence>`, so that a worker's
    # report of admitted requests names the router's reservation.
    request_id: str
    # Digest of the tokenizer files that made `prompts`; another one at the worker: it encodes anew.
    tokenizer_digest: str
    # What the router expected to be cached, in tokens, for predicted-against-reported metrics.
    matched_tokens: int = 0
    # Which member of the group the router chose; None: the worker chooses.
    dp_rank: int | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of the generation, whatever its endpoint."""

    sampling: SamplingParams  # of the first choice; `max_tokens` is settled by `sampling_for`
    max_tokens: int | None  # None: as many as fit
    n: int  # choices of each prompt
    shown: int  # of these, the most probable ones
    shows_logprobs: bool
    prompt_logprobs: int | None  # alternatives to each of the prompt's tokens, which are shown
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool  # every chunk of a stream has the usage so far
    ignore_eos: bool
    include_stop: bool  # the stop string or token ends the text instead of being cut off
    skip_special_tokens: bool
    priority: int
    prefix_cache: bool
    cache_salt: str | None
    return_token_ids: bool
    service_tier: str | None
    prompt_param: str  # "messages" or "prompt"
    constraint: Constraint | None = None  # what the answer must be
    allowed_token_ids: tuple[int, ...] | None = None  # the only ones that it may have
    bad_words: tuple[str, ...] = ()  # which it must not have

    def max_tokens_for(self, prompt_tokens: int, limits: ModelLimits) -> int:
        """How many tokens to generate after a prompt of that length.

        Raises:
            ApiError: 400 `context_length_exceeded`, when prompt and completion do not fit.
        """
        room = limits.max_model_len - prompt_tokens
        wanted = self.max_tokens if self.max_tokens is not None else max(1, room)
        if wanted > room:
            raise errors.context_length_exceeded(
                limits.max_model_len, prompt_tokens, wanted, self.prompt_param
            )
        return wanted

    def sampling_for(
        self, max_tokens: int, sequence: int, eos_ids: Iterable[int]
    ) -> SamplingParams:
        """Sampling of one sequence; each of a request's sequences has a seed of its own."""
        stops = dict.fromkeys(self.sampling.stop_token_ids)
        if not self.ignore_eos:
            stops.update(dict.fromkeys(eos_ids))
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=max_tokens,
            seed=(self.sampling.seed + sequence) % (1 << 63),
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            stop_token_ids=tuple(stops),
        )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to any endpoint, checked."""

    model: str
    generation: Generation

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def echoed(self) -> list[str] | list[list[int]]:
        """Prompts, as they were given, that are shown before their choices; empty: none is."""
        return []


class ChatRequest(Request, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Tools | None
    include_reasoning: bool  # false: it is generated, but not shown
    max_reasoning_tokens: int | None  # after which a block of reasoning is ended


class CompletionRequest(Request, frozen=True, kw_only=True):
    prompts: list[str] | list[list[int]]
    echo: bool

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def echoed(self) -> list[str] | list[list[int]]:
        return self.prompts if self.echo else []


class _ModelOnly(msgspec.Struct):
    model: str | None = None


class _BiasesOnly(msgspec.Struct):
    logit_bias: dict[str, msgspec.Raw]


Body = TypeVar("Body", bound=msgspec.Struct)

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_model_decoder = msgspec.json.Decoder(_ModelOnly)


def peek_model(body: bytes) -> str:
    """The `model` of a body, before it is known against which model to check the rest.

    Raises:
        ApiError: 400, when the body is not a JSON object or names no model.
    """
    return _require_model(decode(_model_decoder, body).model)


def with_model(body: bytes, model: str) -> bytes:
    """A body that was read before, asking for another model; the rest stays as it is."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": model})


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
    model = _require_model(wire.model)
    messages = _checked_messages(wire.messages)
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
    model = _require_model(wire.model)
    prompts = _checked_prompts(wire.prompt, limits)
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
    return CompletionRequest(model=model, prompts=prompts, generation=generation, echo=echo)


# ---- decoding --------------------------------------------------------------------------------

_LOCATION = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_FLOAT_FOR_INT = ("Expected `int`, got `float`", "Expected `int | null`, got `float`")
_WHOLE = re.compile(rb"(-?[0-9]{1,19})\.0+")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`$")
_NOT_A_NUMBER = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*-?$')


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Read a body off the wire; `16.0` is an integer too, which some languages write so.

    Raises:
        ApiError: 400, naming the field where it can.
    """
    try:
        if not body.isascii():
            body.decode("utf-8")  # msgspec skips unknown fields without looking at their bytes
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise errors.invalid("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise errors.invalid("The request body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        text = str(error)
        whole = _with_whole_numbers(body) if text.startswith(_FLOAT_FOR_INT) else body
        if whole == body:
            raise _named(text, body) from None
        return decode(decoder, whole)
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


def _with_whole_numbers(body: bytes) -> bytes:
    """The body with its own fields' whole numbers written as such; the same where it has none, or
    is malformed behind the first of them."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return body
    whole = {name: _WHOLE.fullmatch(value) for name, value in fields.items()}
    if not any(whole.values()):
        return body
    numbers = {name: int(found[1]) for name, found in whole.items() if found}
    return msgspec.json.encode({**fields, **numbers})


def _named(text: str, body: bytes) -> errors.ApiError:
    """msgspec's text names the field by its path: that becomes `param`."""
    match = _LOCATION.search(text)
    reason = text[: match.start()] if match else text
    path = match[1] if match else ""
    if path == "logit_bias[...]":
        key = _bias_of_wrong_type(body)
        if key is not None:
            return _bias_out_of_bounds(key)
    param = path.replace("[...]", "")
    missing = _MISSING.match(reason)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return errors.invalid(f"Missing required parameter: '{param}'.", param)
    if not param:
        return errors.invalid(f"The request body must be a JSON object: {reason}.")
    return errors.invalid(f"Invalid value for '{param}': {reason.replace('`', '')}.", param)


def _bias_of_wrong_type(body: bytes) -> str | None:
    """The first key of a value that is no number, which msgspec's path leaves out; None where the
    body has a key twice, so that the last one hides it."""
    try:
        biases = msgspec.json.decode(body, type=_BiasesOnly).logit_bias
    except msgspec.ValidationError:
        return None
    for key, value in biases.items():
        try:
            msgspec.json.decode(value, type=float)
        except msgspec.ValidationError:
            return key
    return None


def _malformed(body: bytes, text: str) -> errors.ApiError:
    """JSON has no NaN and no Infinity, but Python's encoder writes them: name the field."""
    position = re.search(r"\(byte (\d+)\)", text)
    before = body[: int(position[1])][-200:] if position else b""
    match = _NOT_A_NUMBER.search(before)
    if match:
        name = match[1].decode()
        return errors.invalid(f"Invalid value for '{name}': not a JSON value.", name)
    return errors.invalid("The request body is not valid JSON.")


def _require_model(model: str | None) -> str:
    if not model:
        raise errors.invalid("You must provide a 'model' parameter.", "model")
    return model


# ---- fields ----------------------------------------------------------------------------------


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
        for name, neutral in self._table.items():
            value = getattr(wire, name)
            if value is not None and value not in neutral:
                raise errors.unsupported(name)


_chat_unsupported = _Unsupported(CHAT_NEUTRAL)
_completion_unsupported = _Unsupported(COMPLETION_NEUTRAL)


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
    min_tokens = wire.min_tokens or 0
    if min_tokens > (limits.max_model_len if max_tokens is None else max_tokens):
        raise errors.invalid("'min_tokens' must not exceed the tokens to generate.", "min_tokens")
    stop = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    options = wire.stream_options or StreamOptions()
    defaults = limits.defaults
    return Generation(
        sampling=SamplingParams(
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
            logprobs=0
            if logprobs is None and n > shown
            else logprobs,  # the best is chosen by them
            prompt_logprobs=max(scored_prompt, default=None),
        ),
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
            raise _bias_out_of_bounds(key)
        bias[int(key)] = value
    return bias


def _bias_out_of_bounds(key: str) -> errors.ApiError:
    return errors.invalid(
        f"The value of the key '{errors.shorten(key, 32)}' of 'logit_bias' must be a number from "
        f"-{MAX_BIAS} to {MAX_BIAS}.",
        "logit_bias",
    )


def valid_token_ids(ids: list[int], param: str, vocab_size: int) -> list[int]:
    """The same ids.

    Raises:
        ApiError: 400, one is not of the vocabulary.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise errors.invalid(f"'{param}' has a token id outside 0..{vocab_size - 1}.", param)
    return ids


def _allowed_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise errors.invalid("'allowed_token_ids' must not be empty.", "allowed_token_ids")
    return tuple(dict.fromkeys(valid_token_ids(ids, "allowed_token_ids", vocab_size)))


def _checked_prompts(
    prompt: str | list[str | int | list[int]] | None, limits: ModelLimits
) -> list[str] | list[list[int]]:
    if prompt is None:
        raise errors.invalid("Missing required parameter: 'prompt'.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.invalid("'prompt' must not be empty.", "prompt")
    if all(type(item) is int for item in prompt):
        single = [item for item in prompt if isinstance(item, int)]
        return [valid_token_ids(single, "prompt", limits.vocab_size)]
    if len(prompt) > MAX_SEQUENCES:
        raise errors.invalid(f"'prompt' has more than {MAX_SEQUENCES} entries.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return texts
    if len(lists) != len(prompt):
        raise errors.invalid("'prompt' must not mix strings and token ids.", "prompt")
    for index, ids in enumerate(lists):
        if not ids:
            raise errors.invalid(f"'prompt[{index}]' must not be empty.", f"prompt[{index}]")
        valid_token_ids(ids, f"prompt[{index}]", limits.vocab_size)
    return lists


def _checked_messages(messages: list[ChatMessage] | None) -> list[ChatMessage]:
    if messages is None:
        raise errors.invalid("Missing required parameter: 'messages'.", "messages")
    if not messages:
        raise errors.invalid("'messages' must not be empty.", "messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _check_message(message, f"messages[{index}]")
    return messages


def _is_plain(message: ChatMessage) -> bool:
    """Whether it is a text by someone known, and asks for nothing more: most are."""
    return (
        message.role in ROLES
        and isinstance(message.content, str)
        and message.tool_calls is None
        and message.audio is None
        and message.function_call is None
    )


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise errors.invalid(
            f"Invalid value for '{where}.role': must be one of {', '.join(ROLES)}.",
            f"{where}.role",
        )
    for field in MESSAGE_UNSUPPORTED:
        if getattr(message, field) is not None:
            raise errors.unsupported(f"{where}.{field}")
    if message.content is None and message.role != "assistant":
        raise errors.invalid(f"Missing required parameter: '{where}.content'.", f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise errors.invalid(
            f"'{where}.tool_calls' is allowed in assistant messages only.",
            f"{where}.tool_calls",
        )
    for number, call in enumerate(message.tool_calls or ()):
        if (call.function is None) == (call.custom is None):
            raise errors.invalid(
                f"'{where}.tool_calls[{number}]' must have 'function' or 'custom'.",
                f"{where}.tool_calls[{number}].function",
            )
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            _check_part(part, f"{where}.content[{position}]")


def _check_part(part: ContentPart, where: str) -> None:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in PART_TYPES:
        raise errors.unsupported(where, f"'{where}' is not text; only text parts are supported.")
    if text is None:
        raise errors.invalid(f"Missing required parameter: '{where}.text'.", f"{where}.text")
