"""Logprobs of the engine in the shapes of the two completion APIs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from radixgrove.protocol.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    floored,
)
from radixgrove.worker.frontend.detokenize import Vocabulary
from radixgrove.worker.frontend.sequence import ScoredToken
from radixgrove.worker.messages import TokenLogprobs


def chat_logprobs(scored: SequenceOf[ScoredToken], vocabulary: Vocabulary) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=vocabulary.token_text(item.token_id),
                logprob=floored(item.logprobs.logprob),
                bytes=list(vocabulary.token_bytes(item.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=vocabulary.token_text(number),
                        logprob=floored(logprob),
                        bytes=list(vocabulary.token_bytes(number)),
                    )
                    for number, logprob in item.logprobs.top
                ],
            )
            for item in scored
            if item.logprobs is not None
        ]
    )


def completion_logprobs(
    scored: SequenceOf[ScoredToken], vocabulary: Vocabulary
) -> CompletionLogprobs:
    """Parallel lists. The alternatives always include the chosen token."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for item in scored:
        text = _completion_token(item.token_id, vocabulary)
        result.tokens.append(text)
        result.text_offset.append(item.offset)
        if item.logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        chosen = floored(item.logprobs.logprob)
        alternatives: dict[str, float] = {}
        for number, logprob in item.logprobs.top:
            # Tokens may share a text: the most probable one stands for it.
            alternatives.setdefault(_completion_token(number, vocabulary), floored(logprob))
        alternatives.setdefault(text, chosen)
        result.token_logprobs.append(chosen)
        result.top_logprobs.append(alternatives)
    return result


def _completion_token(token_id: int, vocabulary: Vocabulary) -> str:
    """These lists have no field for bytes: OpenAI marks what is no whole character."""
    text = vocabulary.token_text(token_id)
    return text if vocabulary.is_text(token_id) else f"bytes:{text}"


def scored_prompt(
    token_ids: SequenceOf[int],
    logprobs: SequenceOf[TokenLogprobs | None],
    vocabulary: Vocabulary,
) -> list[ScoredToken]:
    """Tokens of an echoed prompt with their place in its text."""
    detokenizer = vocabulary.detokenizer(skip_special_tokens=False)
    scored = []
    offset = 0
    for position, token_id in enumerate(token_ids):
        entry = logprobs[position] if position < len(logprobs) else None
        scored.append(ScoredToken(token_id, entry, offset))
        offset += len(detokenizer.push((token_id,)))
    return scored
