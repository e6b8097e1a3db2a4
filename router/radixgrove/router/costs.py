"""What lua/place.lua is given to reckon the cost of a placement with."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from radixgrove.protocol.placing import DECODE_TOKENS, HIT_CREDIT, MOST_CREDIT_MS
from radixgrove.protocol.registry import Registration
from radixgrove.router.replicas import Replica


class PlacementFacts(msgspec.Struct, kw_only=True):
    """Of registered replicas, a list each in one order; encoded as a map, so that names count."""

    generation: list[str] = []
    token_ms: list[float] = []  # of prefill, a token
    host_token_ms: list[float] = []  # to bring back a token; 0: no host tier
    max_running: list[int] = []  # 0: unknown
    indexed: list[bool] = []  # its blocks are named as the request's
    decode_tokens: int = DECODE_TOKENS
    hit_credit: float = HIT_CREDIT
    most_credit_ms: float = MOST_CREDIT_MS

    @classmethod
    def of(cls, replicas: Iterable[Replica], service: Registration) -> PlacementFacts:
        facts = cls()
        for replica in replicas:
            assert replica.registration is not None, "only registered replicas are in the index"
            facts.generation.append(replica.generation)
            facts.token_ms.append(replica.token_ms)
            facts.host_token_ms.append(replica.host_token_ms)
            facts.max_running.append(replica.max_running)
            facts.indexed.append(replica.registration.namespace == service.namespace)
        return facts
