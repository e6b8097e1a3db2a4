"""A request's life in the engine, as an explicit state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.errors import Defect
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.messages import CacheMode, Submit, TokenLogprobs
from radixgrove.worker.scheduler.rules import SequenceRules


class RequestState(StrEnum):
    WAITING = "waiting"
    AWAITING_GRAMMAR = "awaiting-grammar"  # what its answer must be is being compiled
    AWAITING_KV = "awaiting-kv"  # its KV is on its way from elsewhere; it holds no row yet
    PREFILL = "prefill"
    DECODE = "decode"  # all known tokens are launched; it may be waiting for its last samples
    PREEMPTED = "preempted"  # waits again, first in line, with what it has generated so far
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"


_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {
            RequestState.AWAITING_GRAMMAR,
            RequestState.AWAITING_KV,
            RequestState.PREFILL,
            RequestState.ABORTED,
            RequestState.REFUSED,
        }
    ),
    RequestState.AWAITING_GRAMMAR: frozenset(
        {RequestState.WAITING, RequestState.PREEMPTED, RequestState.ABORTED, RequestState.REFUSED}
    ),
    RequestState.AWAITING_KV: frozenset(
        {RequestState.WAITING, RequestState.PREEMPTED, RequestState.ABORTED, RequestState.REFUSED}
    ),
    RequestState.PREFILL: frozenset(
        {
            RequestState.DECODE,
            RequestState.PREEMPTED,
            RequestState.FINISHED,
            RequestState.ABORTED,
            RequestState.REFUSED,
        }
    ),
    RequestState.DECODE: frozenset(
        {RequestState.PREEMPTED, RequestState.FINISHED, RequestState.ABORTED, RequestState.REFUSED}
    ),
    RequestState.PREEMPTED: frozenset(
        {
            RequestState.AWAITING_GRAMMAR,  # its matcher is built anew
            RequestState.AWAITING_KV,
            RequestState.PREFILL,
            RequestState.FINISHED,  # by what its grammar adds by itself
            RequestState.ABORTED,
            RequestState.REFUSED,
        }
    ),
    RequestState.FINISHED: frozenset(),
    RequestState.ABORTED: frozenset(),
    RequestState.REFUSED: frozenset(),
}


class IllegalTransition(Defect):
    """A request was asked to do what its state does not allow: a defect of the scheduler."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from its `Submit` to its one end."""

    request_id: str
    frontend: int
    prompt: bytes  # int32 LE
    prompt_len: int
    submit: Submit
    scope: CacheScope
    order: int  # of arrival
    arrived: float  # Unix seconds
    deadline: float  # Unix seconds: still waiting then, it is refused
    limit: int  # most tokens it may generate
    stop_ids: frozenset[int]
    min_tokens: int
    wants_logprobs: bool
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    active: RunningRequest | None = None
    rules: SequenceRules | None = None  # which tokens it may have; None: any
    renewed: int | None = None  # tokens it had when it got its rules anew, the last time
    answered: bool = False  # its first message left
    says_more: bool = True  # its next message holds more than tokens and an end
    cached_tokens: int | None = None  # of its first admission
    # Filled chunk by chunk; the first prompt token has no logprob.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    awaits_prefix: bool = False  # waits for pages that another request is computing
    fetched: bool = False  # has waited for a load already since it was queued
    matched: int = 0  # pages that the cache held at the last look, a hint for ordering
    matched_version: int = -1  # the tree's version at that look

    def become(self, state: RequestState) -> None:
        """Raises IllegalTransition."""
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.request_id}: {self.state} -> {state}")
        self.state = state

    @property
    def ran(self) -> bool:
        """Whether it was admitted before: if it waits now, it was preempted."""
        return self.cached_tokens is not None

    @property
    def length(self) -> int:
        """Known tokens: the prompt and what was generated."""
        return self.prompt_len + len(self.output)

    def tokens(self) -> bytes:
        """All known tokens, int32 LE."""
        if not self.output:
            return self.prompt
        return self.prompt + np.array(self.output, dtype="<i4").tobytes()

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still owed: they need every prompt token's logits."""
        return (
            self.submit.sampling.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.prompt_len
        )

    @property
    def writes_cache(self) -> bool:
        return self.submit.cache is CacheMode.USE

    @property
    def reads_cache(self) -> bool:
        return self.writes_cache and not self.wants_prompt_logprobs


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One stay of a request in a row of the device's table, from admission to its release.

    Of `pages` the first `node.end` belong to the tree, locked at `node`, the others to the request.
    Without a node (the cache is bypassed) all are the request's.
    """

    request: Request
    row: int
    tokens: bytes  # known at admission: what prefill computes
    length: int  # tokens in `tokens`
    node: TreeNode | None
    pages: list[int]
    announced: int  # pages that the device knows of
    launched: int  # most tokens with KV written once all launched steps have ended
    prefilled: int  # of `tokens`: their KV is written, and is not written again
    capacity: int  # tokens that `pages` hold
    tokens_left: int  # what it may still generate if steps in flight yield all they may
    matched: int = 0  # of `pages`, whose tokens the cache held at admission, usable or not
    # Where there are window pages: those of pages [window_from, window_to) are pinned by this row.
    window_from: int = 0
    window_to: int = 0
    held: bool = False  # decodes only after a step in flight has been collected
    turn: int = 0  # of the batch, in which it was sampled last
    spoiled: bool = False  # its values are NaN: nothing of it is to be cached
    live: bool = True  # False once released: results that arrive later are discarded
    claim: tuple[TreeNode, bytes] | None = None  # under which `InFlightPrefixes` lists it

    @property
    def computed(self) -> int:
        """Tokens with KV that is written, and not written again: a step that generates leaves out
        the last of a row's tokens."""
        length = self.request.length
        return length - 1 if length > self.length else self.prefilled

    @property
    def next_query(self) -> int:
        """The first position that a step which is yet to be planned may compute."""
        return min(self.launched, self.request.length - 1)

    @property
    def in_prefill(self) -> bool:
        return self.launched < self.length

    @property
    def ending(self) -> bool:
        """Nothing is left to launch, unless steps in flight yield less than they may."""
        return self.tokens_left == 0 and not self.in_prefill


def count_tokens(token_ids: bytes) -> int:
    return len(token_ids) // TOKEN_BYTES
