"""What it costs to give a request to a replica, by what one process knows itself.

Routers use it where Redis does not decide, a worker's frontends among the members of its group.
`lua/place.lua` explains the formula and has two terms more: the time to load tokens from a host
tier, and the wait for a row of a full batch.
"""

from __future__ import annotations

DECODE_TOKENS = 16  # a running request delays a prefill about as much as these many tokens
HIT_CREDIT = 9.0  # times the time that the cache saves
MOST_CREDIT_MS = 250.0
# For replicas that do not say how fast they are; only the proportions of costs matter.
DEFAULT_TOKENS_PER_SECOND = 8000.0


def cost(load_ms: float, prompt_tokens: int, matched_tokens: int, token_ms: float) -> float:
    """Estimated milliseconds to the first token, less a credit for what need not be computed.

    Args:
        load_ms: of what the replica has to do already.
        token_ms: of prefill.
    """
    saved = matched_tokens * token_ms
    return load_ms + prompt_tokens * token_ms - saved - min(HIT_CREDIT * saved, MOST_CREDIT_MS)
