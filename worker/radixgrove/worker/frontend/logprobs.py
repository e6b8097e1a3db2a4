"""Logprobs of the engine as the formats of answers take them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from radixgrove.protocol.openai.formats import ScoredBytes
from radixgrove.worker.frontend.detokenize import Vocabulary
from radixgrove.worker.frontend.events import ScoredToken
from radixgrove.worker.messages import TokenLogprobs


def scored_bytes(scored: SequenceOf[ScoredToken], vocabulary: Vocabulary) -> list[ScoredBytes]:
    token_bytes = vocabulary.token_bytes
    return [
        ScoredBytes(
            token=token_bytes(item.token_id),
            offset=item.offset,
            logprob=None if item.logprobs is None else item.logprobs.logprob,
            top=[
                (token_bytes(number), logprob)
                for number, logprob in (item.logprobs.top if item.logprobs is not None else ())
            ],
        )
        for item in scored
    ]


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
