"""OpenAI's response bodies and stream chunks for chat and text completions.

Objects are msgspec structs. Stream chunks are what a busy server makes most of: their constant
parts are encoded once a stream, and a text chunk costs one small JSON string.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

LOGPROB_FLOOR = -9999.0  # JSON has no -Infinity
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """`prompt` and `cached` count each prompt once, however many choices it has."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(),
        )


# ---- logprobs --------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """One token of a chat completion's `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists; the first token of an echoed prompt has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


def floored(logprob: float) -> float:
    """A logprob that JSON can carry (also in place of NaN)."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


# ---- whole responses -------------------------------------------------------------------------


class ChatMessageOut(msgspec.Struct, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageOut
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every object of one response has in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None

    @classmethod
    def new(
        cls, *, chat: bool, stream: bool, model: str, fingerprint: str, service_tier: str | None
    ) -> Head:
        if chat:
            prefix, kind = "chatcmpl", "chat.completion.chunk" if stream else "chat.completion"
        else:
            prefix, kind = "cmpl", "text_completion"
        return cls(
            id=f"{prefix}-{uuid4().hex}",
            object=kind,
            created=int(time.time()),
            model=model,
            system_fingerprint=fingerprint,
            service_tier=service_tier,
        )

    def fields(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        if self.service_tier is None:
            del fields["service_tier"]
        return fields


def whole(
    head: Head,
    choices: list[ChatChoice] | list[CompletionChoice],
    usage: Usage,
    prompt_token_ids: list[int] | None = None,
) -> bytes:
    """The body of a response that does not stream."""
    body = {**head.fields(), "choices": choices, "usage": usage}
    if prompt_token_ids is not None:
        body["prompt_token_ids"] = prompt_token_ids
    return _encode(body)


# ---- streams ---------------------------------------------------------------------------------


class StreamEncoder:
    """Server-sent events of one response, in OpenAI's order.

    For each choice `opening` (chat only), any number of `text`, one `finish` with an empty delta;
    then `usage` when asked for, then `DONE`. `id` and `created` are the same throughout.
    """

    def __init__(self, head: Head, *, chat: bool, include_usage: bool) -> None:
        self._chat = chat
        opened = _encode(head.fields())[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._delta = b',"delta":{"content":' if chat else b',"text":'
        # With `include_usage` every chunk but the last one has `usage: null`.
        self._after = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._usage = b"data: " + opened + b',"choices":[],"usage":'
        closed = b"}" if chat else b""
        self._plain_end = closed + b',"logprobs":null,"finish_reason":null}]' + self._after

    def opening(self, index: int, prompt_token_ids: list[int] | None = None) -> bytes:
        """A chat choice's first chunk: the role, once."""
        extra = b""
        if prompt_token_ids is not None:
            extra = b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return b"".join(
            [
                self._before,
                b'%d,"delta":{"role":"assistant","content":"","refusal":null}' % index,
                b',"logprobs":null,"finish_reason":null}]',
                extra,
                self._after,
            ]
        )

    def text(
        self,
        index: int,
        text: str,
        logprobs: ChatLogprobs | CompletionLogprobs | None = None,
        token_ids: list[int] | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        """New text of a choice."""
        if logprobs is None and token_ids is None and prompt_token_ids is None:
            return b"%s%d%s%s%s" % (
                self._before,
                index,
                self._delta,
                _encode(text),
                self._plain_end,
            )
        parts = [self._before, b"%d" % index, self._delta, _encode(text)]
        if self._chat:
            parts.append(b"}")
        parts += [b',"logprobs":', _encode(logprobs), b',"finish_reason":null']
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(token_ids)]
        if prompt_token_ids is not None:
            parts += [b',"prompt_token_ids":', _encode(prompt_token_ids)]
        parts += [b"}]", self._after]
        return b"".join(parts)

    def finish(self, index: int, reason: str) -> bytes:
        """A choice's last chunk: why it ended, and nothing else."""
        empty = b',"delta":{}' if self._chat else b',"text":""'
        return b"".join(
            [
                self._before,
                b"%d" % index,
                empty,
                b',"logprobs":null,"finish_reason":',
                _encode(reason),
                b"}]",
                self._after,
            ]
        )

    def usage(self, usage: Usage) -> bytes:
        return self._usage + _encode(usage) + b"}\n\n"


# ---- models ----------------------------------------------------------------------------------


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int | None  # None: a foreign engine's, which does not say
    owned_by: str = "radixgrove"
    object: str = "model"
    root: str | None = None  # the id of which this one is an alias


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"
