"""How the answers of each endpoint are written, whole and streamed.

Stream chunks are what a busy server makes most of: their constant parts are encoded once a stream,
and a text chunk costs one small JSON string.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

import msgspec

from radixgrove.protocol.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessageOut,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CustomOut,
    FunctionOut,
    Head,
    PromptLogprobs,
    TokenLogprob,
    ToolCallOut,
    TopLogprob,
    Usage,
)

LOGPROB_FLOOR = -9999.0  # JSON has no -Infinity
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encode = msgspec.json.Encoder().encode

Logprobs = ChatLogprobs | CompletionLogprobs


@dataclass(slots=True)
class ScoredBytes:
    """A token with its logprobs, and where its text begins in the text of its choice."""

    token: bytes
    offset: int  # characters
    logprob: float | None  # None: the first token of a prompt has none
    top: list[tuple[bytes, float]]  # the most probable tokens, in order


@dataclass(slots=True)
class ToolCall:
    """A tool call; `arguments` is the text of a JSON object, if the model wrote one, or what
    a custom tool gets."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False

    def shown(self) -> ToolCallOut:
        if self.custom:
            custom = CustomOut(name=self.name, input=self.arguments)
            return ToolCallOut(id=self.id, type="custom", custom=custom)
        function = FunctionOut(name=self.name, arguments=self.arguments)
        return ToolCallOut(id=self.id, type="function", function=function)


@dataclass(slots=True)
class Choice:
    """A finished choice, whatever its endpoint."""

    index: int
    text: str
    reasoning: str
    calls: list[ToolCall]
    finish_reason: str
    logprobs: Logprobs | None
    token_ids: list[int] | msgspec.UnsetType
    prompt_token_ids: list[int] | msgspec.UnsetType
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class AnswerFormat(ABC):
    """What sets the answers of one endpoint apart."""

    body: ClassVar[type[Head]]  # of an answer that does not stream
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    # A chunk's choice, up to its text, behind it, and without any.
    before_text: ClassVar[bytes]
    after_text: ClassVar[bytes]
    no_text: ClassVar[bytes]

    @abstractmethod
    def whole(self, head: Head, choices: list[Choice], usage: Usage) -> bytes:
        """The body of an answer that does not stream."""

    @abstractmethod
    def logprobs(self, scored: Iterable[ScoredBytes]) -> Logprobs: ...

    @abstractmethod
    def opening(
        self, stream: StreamEncoder, index: int, text: str, prompt_token_ids: list[int] | None
    ) -> bytes:
        """A choice's first event; empty when it needs none.

        Args:
            text: the echoed prompt.
        """

    # What a dialect has no place for it does not show.

    def reasoning(self, stream: StreamEncoder, index: int, text: str) -> bytes:
        """New reasoning of a choice."""
        return b""

    def call_begins(self, stream: StreamEncoder, index: int, number: int, call: ToolCall) -> bytes:
        """A choice's call `number` begins."""
        return b""

    def call_arguments(
        self, stream: StreamEncoder, index: int, number: int, text: str, *, custom: bool
    ) -> bytes:
        """New arguments of a choice's call; `custom`: new input of a custom tool."""
        return b""


class ChatFormat(AnswerFormat):
    body = ChatCompletion
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b',"delta":{"content":'
    after_text = b"}"
    no_text = b',"delta":{}'

    def whole(self, head: Head, choices: list[Choice], usage: Usage) -> bytes:
        answer = ChatCompletion(
            **msgspec.structs.asdict(head),
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=_message(choice),
                    finish_reason=choice.finish_reason,
                    logprobs=choice.logprobs,  # type: ignore[arg-type]
                    token_ids=choice.token_ids,
                )
                for choice in choices
            ],
            usage=usage,
            prompt_token_ids=choices[0].prompt_token_ids,
            prompt_logprobs=choices[0].prompt_logprobs,
        )
        return _encode(answer)

    def logprobs(self, scored: Iterable[ScoredBytes]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=token_text(item.token),
                    logprob=floored(item.logprob),
                    bytes=list(item.token),
                    top_logprobs=[
                        TopLogprob(
                            token=token_text(token), logprob=floored(logprob), bytes=list(token)
                        )
                        for token, logprob in item.top
                    ],
                )
                for item in scored
                if item.logprob is not None
            ]
        )

    def opening(
        self, stream: StreamEncoder, index: int, text: str, prompt_token_ids: list[int] | None
    ) -> bytes:
        """The role, once a choice; ids of the prompt, once an answer."""
        delta = b',"delta":{"role":"assistant","content":"","refusal":null}'
        return stream.event(index, delta, prompt_token_ids=prompt_token_ids if not index else None)

    def reasoning(self, stream: StreamEncoder, index: int, text: str) -> bytes:
        """Under both names that clients read."""
        encoded = _encode(text)
        delta = b',"delta":{"reasoning":%s,"reasoning_content":%s}' % (encoded, encoded)
        return stream.event(index, delta)

    def call_begins(self, stream: StreamEncoder, index: int, number: int, call: ToolCall) -> bytes:
        """`id`, `type` and `name` come here and never again: clients add up what they get."""
        delta = b',"delta":{"tool_calls":[{"index":%d,%s]}' % (number, _encode(call.shown())[1:])
        return stream.event(index, delta)

    def call_arguments(
        self, stream: StreamEncoder, index: int, number: int, text: str, *, custom: bool
    ) -> bytes:
        call = b'"custom":{"input":%s}' if custom else b'"function":{"arguments":%s}'
        delta = b',"delta":{"tool_calls":[{"index":%d,%s}]}' % (number, call % _encode(text))
        return stream.event(index, delta)


class CompletionFormat(AnswerFormat):
    body = Completion
    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    before_text = b',"text":'
    after_text = b""
    no_text = b',"text":""'

    def whole(self, head: Head, choices: list[Choice], usage: Usage) -> bytes:
        answer = Completion(
            **msgspec.structs.asdict(head),
            choices=[
                CompletionChoice(
                    index=choice.index,
                    text=choice.text,
                    finish_reason=choice.finish_reason,
                    logprobs=choice.logprobs,  # type: ignore[arg-type]
                    token_ids=choice.token_ids,
                    prompt_token_ids=choice.prompt_token_ids,
                    prompt_logprobs=choice.prompt_logprobs,
                )
                for choice in choices
            ],
            usage=usage,
        )
        return _encode(answer)

    def logprobs(self, scored: Iterable[ScoredBytes]) -> CompletionLogprobs:
        """Parallel lists. The alternatives always include the chosen token."""
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for item in scored:
            text = _marked(item.token)
            result.tokens.append(text)
            result.text_offset.append(item.offset)
            if item.logprob is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            chosen = floored(item.logprob)
            alternatives: dict[str, float] = {}
            for token, logprob in item.top:
                # Tokens may share a text: the most probable one stands for it.
                alternatives.setdefault(_marked(token), floored(logprob))
            alternatives.setdefault(text, chosen)
            result.token_logprobs.append(chosen)
            result.top_logprobs.append(alternatives)
        return result

    def opening(
        self, stream: StreamEncoder, index: int, text: str, prompt_token_ids: list[int] | None
    ) -> bytes:
        if prompt_token_ids is not None:
            return stream.text(index, text, token_ids=[], prompt_token_ids=prompt_token_ids)
        return stream.text(index, text) if text else b""


def _message(choice: Choice) -> ChatMessageOut:
    """Reasoning and calls only where there are any; no content is null beside calls."""
    reasoning = choice.reasoning or msgspec.UNSET
    calls = [call.shown() for call in choice.calls]
    return ChatMessageOut(
        content=choice.text or None if calls else choice.text,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or msgspec.UNSET,
    )


def new_head(
    form: AnswerFormat, *, stream: bool, model: str, fingerprint: str, service_tier: str | None
) -> Head:
    """The head of a new answer, under an id of its own."""
    return Head(
        id=f"{form.id_prefix}-{uuid4().hex}",
        object=form.chunk_object if stream else form.object,
        created=int(time.time()),
        model=model,
        system_fingerprint=fingerprint,
        service_tier=msgspec.UNSET if service_tier is None else service_tier,
    )


class StreamEncoder:
    """Server-sent events of one answer, in OpenAI's order.

    For each choice `opening`, any number of `text`, `reasoning` and calls, one `finish` with an
    empty delta; then `usage` when asked for, then `DONE`. `id` and `created` stay the same.
    """

    def __init__(self, head: Head, form: AnswerFormat, *, include_usage: bool) -> None:
        self._form = form
        opened = _encode(head)[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._usage = b"data: " + opened + b',"choices":[],"usage":'
        self._delta = form.before_text
        # With `include_usage` every chunk but the last one has `usage: null`.
        self._end_chunks_with(b',"usage":null}' if include_usage else b"}")

    def usage_so_far(self, usage: Usage) -> None:
        """Chunks have this usage from now on."""
        self._end_chunks_with(b',"usage":%s}' % _encode(usage))

    def _end_chunks_with(self, after: bytes) -> None:
        self._after = after + b"\n\n"
        end = self._form.after_text + b',"logprobs":null,"finish_reason":null}]'
        self._plain_end = end + self._after

    def opening(
        self, index: int, text: str = "", prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """See `AnswerFormat.opening`."""
        return self._form.opening(self, index, text, prompt_token_ids)

    def text(
        self,
        index: int,
        text: str,
        logprobs: Logprobs | None = None,
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
        parts = [
            *(self._before, b"%d" % index, self._delta, _encode(text), self._form.after_text),
            *(b',"logprobs":', _encode(logprobs), b',"finish_reason":null'),
        ]
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(token_ids)]
        if prompt_token_ids is not None:
            parts += [b',"prompt_token_ids":', _encode(prompt_token_ids)]
        parts += [b"}]", self._after]
        return b"".join(parts)

    def reasoning(self, index: int, text: str) -> bytes:
        return self._form.reasoning(self, index, text)

    def call_begins(self, index: int, number: int, call: ToolCall) -> bytes:
        return self._form.call_begins(self, index, number, call)

    def call_arguments(self, index: int, number: int, text: str, *, custom: bool) -> bytes:
        return self._form.call_arguments(self, index, number, text, custom=custom)

    def event(
        self,
        index: int,
        delta: bytes,
        finish_reason: str | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        """A choice's event without text; ids of the prompt stand beside the choices."""
        parts = [
            *(self._before, b"%d" % index, delta),
            *(b',"logprobs":null,"finish_reason":', _encode(finish_reason), b"}]"),
        ]
        if prompt_token_ids is not None:
            parts += [b',"prompt_token_ids":', _encode(prompt_token_ids)]
        return b"".join([*parts, self._after])

    def finish(self, index: int, reason: str) -> bytes:
        """A choice's last chunk: why it ended, and nothing else."""
        return self.event(index, self._form.no_text, reason)

    def usage(self, usage: Usage) -> bytes:
        return self._usage + _encode(usage) + b"}\n\n"


def floored(logprob: float) -> float:
    """A logprob that JSON can carry (also in place of NaN)."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def token_text(token: bytes) -> str:
    """One token as text. Bytes that are no whole character read as OpenAI has them: `\\xf0`."""
    return token.decode("utf-8", "backslashreplace")


def _marked(token: bytes) -> str:
    """As `token_text`, where no field has the bytes: OpenAI marks what is no whole character."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return f"bytes:{token_text(token)}"
