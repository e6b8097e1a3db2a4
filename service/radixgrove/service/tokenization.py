"""`/tokenize` and `/detokenize`, for router and worker alike."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.openai.tokenization import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    conversation,
    read_detokenize,
    read_tokenize,
    valid_tokens,
)
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.service.api import Api, reply
from radixgrove.service.asgi import WhileConnected, read_body, require_content_type

ANY_LENGTH = 1 << 31  # what is too long for the model is counted too


@dataclass(frozen=True)
class ModelText:
    """What makes tokens of texts for one model."""

    encoder: PromptEncoder
    limits: ModelLimits

    async def tokenize(self, wire: TokenizeBody) -> TokenizeAnswer:
        """
        Raises:
            ApiError: 400, the conversation cannot be rendered.
        """
        limits = msgspec.structs.replace(self.limits, max_model_len=ANY_LENGTH)
        if wire.prompt is not None:
            special = wire.add_special_tokens is not False
            prompt = await self.encoder.text_prompt(wire.prompt, limits, special=special)
        else:
            (prompt,) = await self.encoder.chat_prompts(conversation(wire, limits), limits)
        ids = array("i", prompt.token_ids).tolist()
        pieces = await self.encoder.pieces(ids) if wire.return_token_strs else None
        return TokenizeAnswer(
            count=len(ids),
            max_model_len=self.limits.max_model_len,
            tokens=ids,
            token_strs=pieces,
        )


# The model of a name, or the only one; raises ApiError.
FindModel = Callable[[str | None], Awaitable[ModelText]]


def serve(api: Api, find: FindModel) -> None:
    """Answers both paths."""

    @api.act("/tokenize", TokenizeAnswer, body=TokenizeBody)
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of the prompt that a conversation makes."""
        wire = read_tokenize(await _body(request))
        with WhileConnected(request.scope):
            model = await find(wire.model)
            return reply(await model.tokenize(wire))

    @api.act("/detokenize", DetokenizeAnswer, body=DetokenizeBody)
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens as they read."""
        wire = read_detokenize(await _body(request))
        with WhileConnected(request.scope):
            model = await find(wire.model)
            ids = valid_tokens(wire, model.limits)
            return reply(DetokenizeAnswer(await model.encoder.text_of(ids)))


async def _body(request: Request) -> bytes:
    require_content_type(request.scope, "application/json")
    return await read_body(request.receive)
