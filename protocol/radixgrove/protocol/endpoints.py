"""The endpoints that generate: one entry each, for router and worker alike.

The router reads, encodes and places by it, the worker reads, encodes and answers. A new endpoint
is a new entry of `ENDPOINTS`: a body and how it is read, how its prompts are encoded, and the
format of its answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from radixgrove.protocol.openai.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Neutral,
)
from radixgrove.protocol.openai.formats import AnswerFormat, ChatFormat, CompletionFormat
from radixgrove.protocol.openai.parsing import parse_chat, parse_completion
from radixgrove.protocol.openai.requests import ModelLimits, Request
from radixgrove.protocol.text.prompts import EncodedPrompt, PromptEncoder

R = TypeVar("R", bound=Request)


@dataclass(frozen=True)
class Endpoint(Generic[R]):
    """One way to ask for a generation.

    `parse` raises `ApiError` (400); `encode` gives the token ids of each prompt, and raises it too.
    """

    name: str  # in metrics
    path: str
    body: type[GenerationBody]
    required: tuple[str, ...]  # fields of the body that a request must have
    neutral: Neutral  # fields that are refused, but for these values
    parse: Callable[[bytes, ModelLimits], R]
    encode: Callable[[PromptEncoder, R, ModelLimits], Awaitable[list[EncodedPrompt]]]
    form: AnswerFormat


CHAT = Endpoint(
    name="chat",
    path="/v1/chat/completions",
    body=ChatBody,
    required=("model", "messages"),
    neutral=CHAT_NEUTRAL,
    parse=parse_chat,
    encode=PromptEncoder.chat_prompts,
    form=ChatFormat(),
)
COMPLETIONS = Endpoint(
    name="completions",
    path="/v1/completions",
    body=CompletionBody,
    required=("model", "prompt"),
    neutral=COMPLETION_NEUTRAL,
    parse=parse_completion,
    encode=PromptEncoder.completion_prompts,
    form=CompletionFormat(),
)
ENDPOINTS: tuple[Endpoint[Any], ...] = (CHAT, COMPLETIONS)
