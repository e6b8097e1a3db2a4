"""What the processes of one worker say to each other over ZMQ: msgpack of typed structs, no pickle.

Times are durations, from the moment a message is read: no two processes share a clock.

Sockets live in the worker's private runtime directory (mode 0700), for each data-parallel member m:

    engine-<m>.sock       bound by its engine (PULL): frontends and agent push `ToEngine`
    frontend-<i>-<m>.sock bound by frontend i (PULL): the engine pushes `ToFrontend`
    agent-<m>.sock        bound by the agent (PULL): the engine pushes `ToAgent`
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.registry import EngineInfo as EngineInfo  # one of the messages below


class CacheMode(StrEnum):
    USE = "use"
    BYPASS = "bypass"  # neither read the prefix cache nor leave anything in it


class Finish(StrEnum):
    STOP = "stop"  # a stop token, or the end of its grammar
    LENGTH = "length"  # max_tokens, or the model's maximum length
    ABORT = "abort"  # the frontend asked for it; it frees its state on this message only


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural-log probability of a token and of the best alternatives, most probable first."""

    logprob: float
    top: list[tuple[int, float]] = []


# ---- to the engine ---------------------------------------------------------------------------


class ReasoningRule(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A block of reasoning, in which no grammar holds: it begins behind it."""

    end: int  # the token that ends it
    tail: tuple[int, ...] = ()  # those that belong to its end and follow that one
    open: bool = False  # the prompt ends within it
    begin: int | None = None  # the token that begins it, where no grammar holds yet
    budget: int | None = None  # tokens in it, after which it is ended
    calls: bool = False  # a trigger in it ends it
    # Tokens that must not come in it: they would end an answer that a grammar still owes.
    banned: tuple[int, ...] = ()


class TokenRules(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Which tokens a sequence may have."""

    grammar: str | None = None  # as llguidance takes it; checked by the frontend
    reasoning: ReasoningRule | None = None
    # With them any text comes before the grammar, which is of what follows one of these tokens.
    triggers: tuple[int, ...] = ()
    again: bool = False  # behind the grammar's end text is free again, up to the next trigger
    allowed: tuple[int, ...] | None = None  # no others
    banned: tuple[tuple[int, ...], ...] = ()  # sequences that must not come, each not empty


class Submit(msgspec.Struct, tag="submit", kw_only=True):
    """One sequence to generate."""

    request_id: str  # unique within the worker
    frontend: int  # index of the frontend that gets the outputs
    token_ids: bytes  # int32 little-endian, the whole prompt, at least one token
    sampling: SamplingParams
    domain: str  # sharing domain of the KV cache: "public" or a principal
    priority: int = 0  # higher first, only under the `priority` policy
    queue_timeout: float | None = None  # seconds from now; still waiting then: `Refused`
    cache: CacheMode = CacheMode.USE
    rules: TokenRules | None = None  # any token, without
    lockstep: bool = False  # decode only once all its tokens so far are on the host


class SubmitChoices(msgspec.Struct, tag="choices", kw_only=True):
    """Several sequences of one prompt, which is sent once: `n > 1`."""

    first: Submit
    others: list[tuple[str, SamplingParams]]  # their ids; all else is as in the first


class Abort(msgspec.Struct, tag="abort"):
    request_id: str


class Read(msgspec.Struct, tag="read"):
    """A frontend has read so many bytes since it last said so."""

    frontend: int
    size: int


class FlushCache(msgspec.Struct, tag="flush"):
    """Drop every cached page that no running request holds."""


class PublishSnapshot(msgspec.Struct, tag="snapshot"):
    """The agent lost events (gap, Redis came back empty): send the whole cached set again."""


class Peek(msgspec.Struct, tag="peek", kw_only=True):
    """How much of a prompt the engine has cached, and how busy it is: answered with `Peeked`."""

    peek_id: str
    frontend: int
    token_ids: bytes  # int32 little-endian, at least one token
    domain: str  # as of `Submit`


ToEngine = Submit | SubmitChoices | Abort | Read | FlushCache | PublishSnapshot | Peek

# ---- to a frontend ---------------------------------------------------------------------------


class Tokens(msgspec.Struct, tag="tokens", kw_only=True, omit_defaults=True):
    """New tokens of one request. A finish comes once, with the last tokens (possibly none).

    A stop token that ended the request is the last of `token_ids`; the frontend does not show it. A
    request also stops where its grammar ends, after a token like any other.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a token, when asked for
    finish: Finish | None = None
    stop_token: int | None = None  # which one, when finish is STOP; None: a grammar's end
    cached_tokens: int | None = None  # on a request's first message: prompt tokens from the cache
    # On the first message when asked for: one entry a prompt token, the first of them None.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class RefusalReason(StrEnum):
    QUEUE_FULL = "queue_full"  # 429
    QUEUE_TIMEOUT = "queue_timeout"  # 503
    TOO_LONG = "too_long"  # can never fit the pool or the model's length: 400
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # not compiled in time: 400
    GRAMMAR_FAILED = "grammar_failed"  # over a bound in mid-answer: 400
    INTERNAL = "internal"  # 500: this request alone failed


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The request ends without (further) tokens."""

    request_id: str
    reason: RefusalReason
    detail: str  # safe to show to a client
    retry_after: float | None = None  # seconds


class Outputs(msgspec.Struct, tag="outputs"):
    """Everything one step produced for one frontend, in one message."""

    items: list[Tokens | Refused]


class Peeked(msgspec.Struct, tag="peeked", kw_only=True):
    peek_id: str
    matched_tokens: int  # cached, in either tier, or being computed for another request
    queued_tokens: int  # prompt tokens that other requests have yet to prefill
    running: int  # requests that hold a row
    waiting: int = 0  # for one


class EngineState(StrEnum):
    """Phases of an engine's start, in order; `READY` from then on."""

    LOADING = "loading"
    WARMING_UP = "warming-up"
    CAPTURING = "capturing"
    READY = "ready"


class Stats(msgspec.Struct, tag="stats", kw_only=True):
    """The engine's pulse, sent about five times a second from the scheduler's own loop.

    `ticks` counts loop turns (idle ones too), `steps` executed steps: a pulse that stops, or a step
    that outlives `step_remaining`, means the engine is dead or stuck.
    """

    state: EngineState
    ticks: int
    steps: int
    step_remaining: float | None  # seconds within which the running step must end; None when idle
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of waiting requests, less what the cache holds
    prefill_backlog: int = 0  # tokens that running requests have yet to prefill
    prefill_rate: float = 0.0  # tokens a second, of late; 0: not measured
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0  # cached and unreferenced
    prompt_tokens: int = 0  # counters since start
    cached_tokens: int = 0
    window_lost_tokens: int = 0  # cached, but computed anew: the window before them had gone
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    host_pages_total: int = 0
    host_pages_used: int = 0
    host_cached_tokens: int = 0  # brought back from the host for a request
    saved_pages: int = 0  # copied to the host
    loaded_pages: int = 0  # copied back
    finished: int = 0
    aborted: int = 0
    matchers: int = 0  # of requests with rules, alive
    awaiting_grammar: int = 0  # of `waiting`: their grammar is being built


# ---- to the agent ----------------------------------------------------------------------------


class Tier(StrEnum):
    GPU = "gpu"
    HOST = "host"


class CacheEvent(msgspec.Struct, array_like=True):
    """Index blocks that became matchable or stopped being so, in the order it happened.

    Closure: a block's parent is stored before it and removed after it (in one tier and domain).
    `hashes` is the concatenation of 16-byte chain hashes (`radixgrove.protocol.blocks`).
    """

    stored: bool  # False: removed
    tier: Tier
    domain: str
    hashes: bytes


class CacheEvents(msgspec.Struct, tag="cache_events"):
    """A batch; `sequence` grows by one a batch, so that the agent sees a gap."""

    sequence: int
    events: list[CacheEvent]


class CacheSnapshot(msgspec.Struct, tag="cache_snapshot"):
    """All cached blocks at `sequence`, in chunks; parents first. The last chunk says so."""

    sequence: int
    events: list[CacheEvent]  # all `stored`
    last: bool


class PhaseReport(msgspec.Struct, tag="phase"):
    """Progress of a long start, for people: `fraction` 0..1, or None when unknown."""

    state: EngineState
    message: str
    fraction: float | None = None


class Admitted(msgspec.Struct, tag="admitted"):
    """Requests that began their prefill: the router's reservation for them stops counting.

    Sent before the pulse that has them in its `prefill_backlog`.
    """

    request_ids: list[str]


ToFrontend = Outputs | Stats | EngineInfo | Peeked
ToAgent = CacheEvents | CacheSnapshot | EngineInfo | PhaseReport | Stats | Admitted
