"""The data-parallel members of a worker as a frontend sees them: an engine each, and who gets what.

A router says which member it chose. A request without a choice goes where it is cheapest, by the
same cost that routers reckon with: each engine is asked how much of the prompt it has, and how busy
it is. One that does not say so in time is judged by its last pulse, and by the prompts that were
sent to it since. Where all rows of an engine are taken a request would wait for one to end, which
no prefix makes up for: one with a row to spare goes before it. Other frontends are taken to have
sent it as many as this one, since its last word.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import zmq

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.openai import errors
from radixgrove.protocol.placing import DECODE_TOKENS, DEFAULT_TOKENS_PER_SECOND, cost
from radixgrove.worker.frontend.engine_client import EngineClient, Sent
from radixgrove.worker.messages import Peeked
from radixgrove.worker.runtime import Runtime

PEEK_SECONDS = 0.05  # that a request waits for engines to say what they have of its prompt


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which engine gets a request."""

    engine: EngineClient
    matched_tokens: int = 0  # of its longest prompt, expected to be cached


class Members:
    """All engines of a worker, by `dp_rank`. They live and die together."""

    def __init__(self, runtime: Runtime, index: int) -> None:
        """`index`: this frontend's, by which engines address it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frontends = runtime.settings.frontends
        self.engines = [
            EngineClient(
                self._context,
                runtime.engine_socket(member),
                runtime.frontend_socket(index, member),
                index,
            )
            for member in range(runtime.settings.dp)
        ]

    def __len__(self) -> int:
        return len(self.engines)

    def start(self) -> None:
        """Bind and connect; call on the event loop. The engines need not be there yet."""
        for engine in self.engines:
            engine.start()

    def close(self) -> None:
        """Stop receiving; aborts already queued still leave."""
        for engine in self.engines:
            engine.close()
        self._context.term()

    # ---- all of them -----------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Sequences that the engines have not finished, aborted ones included."""
        return sum(engine.active for engine in self.engines)

    @property
    def gone(self) -> bool:
        """Whether one is lost, and with it the others."""
        return any(engine.gone for engine in self.engines)

    @property
    def heard(self) -> bool:
        """Whether every engine has pulsed."""
        return all(engine.liveness.stats is not None for engine in self.engines)

    @property
    def ready(self) -> list[EngineClient]:
        """Those that take requests."""
        return [engine for engine in self.engines if engine.liveness.ready()]

    @property
    def max_model_len(self) -> int | None:
        """What each of them can take; None before one of them has said it."""
        known = [engine.info.max_model_len for engine in self.engines if engine.info is not None]
        return min(known, default=None)

    @property
    def max_running(self) -> int:
        """Requests that they run at once; 0 before any has said it."""
        return sum(engine.info.max_running for engine in self.engines if engine.info is not None)

    def knows(self, request_id: str) -> bool:
        return any(engine.knows(request_id) for engine in self.engines)

    def check_stuck(self) -> None:
        for engine in self.engines:
            engine.check_stuck()

    # ---- choosing one ----------------------------------------------------------------------------

    def member(self, dp_rank: int) -> EngineClient:
        """The engine that a router chose.

        Raises:
            ApiError: 400, there is no such member; 503, it takes no requests.
        """
        if not 0 <= dp_rank < len(self.engines):
            raise errors.invalid(f"dp_rank {dp_rank} is none of {len(self.engines)} members.")
        if not self.engines[dp_rank].liveness.ready():
            raise errors.overloaded("The engine is not ready.", retry_after=5)
        return self.engines[dp_rank]

    async def choose(self, prompt: bytes, domain: str) -> Chosen:
        """The cheapest engine for a prompt of token ids, int32 little-endian; `domain` as of
        `Submit`.

        Raises:
            ApiError: 503, none takes requests.
        """
        engines = self.ready
        if len(engines) == 1:
            return Chosen(engines[0])
        if not engines:
            raise errors.overloaded("The engine is not ready.", retry_after=5)
        sent = [engine.sent for engine in engines]
        asked = [engine.peek(prompt, domain) for engine in engines]
        waiting = [future for future in asked if future is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=PEEK_SECONDS)
        offers = []
        for engine, future, before in zip(engines, asked, sent, strict=True):
            said = future.result() if future is not None and future.done() else None
            since = engine.sent.since(before if said is not None else engine.sent_at_pulse)
            offers.append(_offer(engine, said, since, prompt, domain, self._frontends))
        offers = [offer for offer in offers if offer.has_row] or offers
        lowest = min(offer.cost for offer in offers)
        best = random.choice([offer for offer in offers if offer.cost <= lowest])
        return Chosen(best.engine, best.matched_tokens)


@dataclass(frozen=True, slots=True)
class _Offer:
    engine: EngineClient
    matched_tokens: int
    cost: float
    has_row: bool


def _offer(
    engine: EngineClient,
    said: Peeked | None,
    since: Sent,
    prompt: bytes,
    domain: str,
    frontends: int,
) -> _Offer:
    """What a prompt costs there.

    Args:
        said: the engine's answer; None: it has none yet.
        since: what this frontend, one of so many, has sent it since it was asked, or since its last
            pulse if it did not answer.
    """
    stats, info = engine.liveness.stats, engine.info
    measured = (stats.prefill_rate if stats else 0.0) or (
        info.prefill_tokens_per_second if info else 0.0
    )
    token_ms = 1000.0 / (measured or DEFAULT_TOKENS_PER_SECOND)
    matched = engine.awaited_tokens(prompt, domain)
    queued, running, taken = since.tokens, 0, since.sequences * frontends
    if said is not None:
        matched = max(matched, said.matched_tokens)
        queued, running = queued + said.queued_tokens, said.running
        taken += said.running + said.waiting
    elif stats is not None:
        queued, running = queued + stats.waiting_tokens + stats.prefill_backlog, stats.running
        taken += stats.running + stats.waiting
    load_ms = (queued + running * DECODE_TOKENS) * token_ms
    tokens = len(prompt) // TOKEN_BYTES
    has_row = info is None or not info.max_running or taken < info.max_running
    return _Offer(engine, matched, cost(load_ms, tokens, matched, token_ms), has_row)
