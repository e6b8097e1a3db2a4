"""Logprobs of the engine as the formats of answers take them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from radixgrove.protocol.openai.formats import ScoredBytes, floored, token_text
from radixgrove.protocol.openai.responses import PromptLogprob, PromptLogprobs
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


def prompt_entries(
    token_ids: SequenceOf[int],
    logprobs: SequenceOf[TokenLogprobs | None],
    most: int,
    vocabulary: Vocabulary,
) -> PromptLogprobs:
    """What was probable at each place of a prompt: its own token, and `most` others at most."""

    def entry(token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        text = token_text(vocabulary.token_bytes(token_id))
        return PromptLogprob(logprob=floored(logprob), rank=rank, decoded_token=text)

    entries: PromptLogprobs = []
    for token_id, scored in zip(token_ids, logprobs, strict=True):
        if scored is None:
            entries.append(None)
            continue
        found = {token_id: entry(token_id, scored.logprob, None)}
        for rank, (other, logprob) in enumerate(scored.top[:most], 1):
            found[other] = entry(other, logprob, rank)
        entries.append(found)
    return entries
