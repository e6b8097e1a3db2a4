"""Bodies and answers of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import (
    MAX_MESSAGES,
    MAX_TEMPLATE_KWARGS,
    ChatBody,
    ChatMessage,
)
from radixgrove.protocol.openai.decoding import decode
from radixgrove.protocol.openai.inputs import valid_token_ids
from radixgrove.protocol.openai.parsing import checked_chat
from radixgrove.protocol.openai.requests import ChatRequest, ModelLimits


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text, or a conversation; `model` may be left out where there is one alone."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)] | None = (
        None
    )
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None  # of a text: what the tokenizer puts before it
    return_token_strs: bool | None = None
    chat_template: Any = None  # not supported


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def read_tokenize(body: bytes) -> TokenizeBody:
    """
    Raises:
        ApiError: 400, naming the parameter.
    """
    wire = decode(_tokenize_decoder, body)
    if (wire.prompt is None) == (wire.messages is None):
        raise errors.invalid("There must be either 'prompt' or 'messages'.", "prompt")
    if wire.prompt is None and wire.add_special_tokens:
        raise errors.unsupported(
            "add_special_tokens", "A chat template itself puts in what begins a conversation."
        )
    return wire


def read_detokenize(body: bytes) -> DetokenizeBody:
    """
    Raises:
        ApiError: 400, naming the parameter.
    """
    return decode(_detokenize_decoder, body)


def conversation(wire: TokenizeBody, limits: ModelLimits) -> ChatRequest:
    """The request for a chat completion, of which the prompt is to be tokenized.

    Raises:
        ApiError: 400, naming the parameter.
    """
    body = ChatBody(
        model=wire.model or "any",  # found before
        messages=wire.messages,
        tools=wire.tools,
        tool_choice=wire.tool_choice,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=wire.continue_final_message,
        chat_template=wire.chat_template,
        chat_template_kwargs=wire.chat_template_kwargs,
        reasoning_effort=wire.reasoning_effort,
    )
    return checked_chat(body, limits)


def valid_tokens(wire: DetokenizeBody, limits: ModelLimits) -> list[int]:
    """
    Raises:
        ApiError: 400, a token is not of the vocabulary.
    """
    return valid_token_ids(wire.tokens, "tokens", limits.vocab_size)
