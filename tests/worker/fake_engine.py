"""An engine without a model that speaks the real ZMQ protocol: its answers are known beforehand."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from radixgrove.worker.messages import (
    Abort,
    EngineInfo,
    EngineState,
    Finish,
    Outputs,
    Peek,
    Peeked,
    PhaseReport,
    Refused,
    Stats,
    Submit,
    SubmitChoices,
    ToAgent,
    ToEngine,
    ToFrontend,
    TokenLogprobs,
    Tokens,
)
from radixgrove.worker.runtime import Runtime

PULSE = Stats(
    state=EngineState.READY,
    ticks=0,
    steps=0,
    step_remaining=None,
    pages_total=100,
    pages_free=60,
    pages_evictable=30,
)


@dataclass
class _Running:
    submit: Submit
    script: list[int]
    position: int = 0


@dataclass
class FakeEngine:
    """Generates `script(submit)`, one token a step for every sequence, then EOS unless cut short.

    `step_seconds` slows it down, `paused` stops it between two tokens, `refuse` turns sequences
    away, `hang` begins a step that never ends. What it says goes to the sockets at `peers`.
    """

    runtime: Runtime
    script: Callable[[Submit], list[int]]
    peers: list[str]
    pulse: Stats = PULSE
    heard: Callable[[ToEngine], None] = lambda _: None
    step_seconds: float = 0.0
    cached_tokens: int = 0
    refuse: Callable[[Submit], Refused | None] = lambda _: None
    # The same in mid-answer, given how many tokens came.
    interrupt: Callable[[Submit, int], Refused | None] = lambda *_: None
    ends_by_grammar: bool = False  # an answer's end comes without a stop token
    submits: list[Submit] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    member: int = 0  # of its worker
    matched_tokens: int | None = 0  # of any prompt, as it says when asked; None: it does not say
    waiting: int = 0  # for a row, as it says then
    infos: queue.SimpleQueue[PhaseReport | EngineInfo] = field(
        default_factory=queue.SimpleQueue
    )  # to be sent
    running: dict[str, _Running] = field(default_factory=dict)
    paused: threading.Event = field(default_factory=threading.Event)
    silent: threading.Event = field(default_factory=threading.Event)  # no Stats any more
    told: int = 0  # Stats so far
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _step_ends: float | None = None  # on the monotonic clock

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="fake engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the sockets, as the kernel does for a process that died."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
            assert not self._thread.is_alive()

    def reset(self) -> None:
        self.step_seconds = 0.0
        self.cached_tokens = 0
        self.refuse = lambda _: None
        self.interrupt = lambda *_: None
        self.matched_tokens = self.waiting = 0
        self.ends_by_grammar = False
        self.paused.clear()
        self.submits.clear()
        self.aborts.clear()

    def hang(self, seconds: float) -> None:
        """Announce a step that may take so long, and never end it."""
        self._step_ends = time.monotonic() + seconds

    # ---- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`, in the thread of the caller."""
        context = zmq.Context()
        inbox = context.socket(zmq.PULL)
        inbox.bind(self.runtime.engine_socket(self.member))
        outboxes = [context.socket(zmq.PUSH) for _ in self.peers]
        for outbox, address in zip(outboxes, self.peers, strict=True):
            outbox.connect(address)
            outbox.setsockopt(zmq.LINGER, 0)

        def tell(message: ToAgent | ToFrontend) -> None:
            for outbox in outboxes:
                outbox.send(msgspec.msgpack.encode(message))

        decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        ticks, last_stats = 0, 0.0
        while not self._stop.is_set():
            ticks += self._step_ends is None
            busy = bool(self.running) and not self.paused.is_set()
            outputs: list[Tokens | Refused] = []
            if inbox.poll(0 if busy else 5):
                message = decoder.decode(inbox.recv())
                if isinstance(message, Peek) and self.matched_tokens is not None:
                    tell(self._peeked(message, self.matched_tokens))
                outputs += self._take(message)
            elif busy:
                outputs += self._step()
            if outputs:
                tell(Outputs(outputs))
            while not self.infos.empty():
                tell(self.infos.get())
            now = time.monotonic()
            if now - last_stats > 0.1 and not self.silent.is_set():
                last_stats = now
                tell(self._stats(ticks, now))
                self.told += 1
        inbox.close(0)
        for outbox in outboxes:
            outbox.close(0)
        context.term()

    def _stats(self, ticks: int, now: float) -> Stats:
        remaining = None if self._step_ends is None else max(0.0, self._step_ends - now)
        changes = {"ticks": ticks, "steps": ticks, "running": len(self.running)}
        return msgspec.structs.replace(self.pulse, step_remaining=remaining, **changes)

    def _peeked(self, peek: Peek, matched: int) -> Peeked:
        return Peeked(
            peek_id=peek.peek_id,
            matched_tokens=matched,
            queued_tokens=0,
            running=len(self.running),
            waiting=self.waiting,
        )

    def _take(self, message: ToEngine) -> list[Tokens | Refused]:
        self.heard(message)
        if isinstance(message, Submit):
            return self._begin(message)
        if isinstance(message, SubmitChoices):
            outputs = self._begin(message.first)
            for name, sampling in message.others:
                choice = msgspec.structs.replace(message.first, request_id=name, sampling=sampling)
                outputs += self._begin(choice)
            return outputs
        if isinstance(message, Abort):
            self.aborts.append(message.request_id)
            if self.running.pop(message.request_id, None) is not None:
                return [Tokens(request_id=message.request_id, token_ids=[], finish=Finish.ABORT)]
        return []

    def _begin(self, submit: Submit) -> list[Tokens | Refused]:
        self.submits.append(submit)
        refused = self.refuse(submit)
        if refused is not None:
            return [refused]
        self.running[submit.request_id] = _Running(submit, self.script(submit))
        return []

    def _step(self) -> list[Tokens | Refused]:
        if self.step_seconds:
            self._stop.wait(self.step_seconds)
        return [self._advance(entry) for entry in list(self.running.values())]

    def _advance(self, entry: _Running) -> Tokens | Refused:
        submit, sampling = entry.submit, entry.submit.sampling
        first = entry.position == 0
        ended = entry.position >= len(entry.script)
        interrupted = self.interrupt(submit, entry.position)
        if interrupted is not None or (ended and self.ends_by_grammar):
            del self.running[submit.request_id]
            end = Tokens(request_id=submit.request_id, token_ids=[], finish=Finish.STOP)
            return interrupted or end
        stops = sampling.stop_token_ids or (0,)  # none with `ignore_eos`: it goes on
        token = stops[0] if ended else entry.script[entry.position]
        entry.position += 1
        finish = None
        if token in sampling.stop_token_ids:
            finish = Finish.STOP
        elif entry.position >= sampling.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            del self.running[submit.request_id]
        return Tokens(
            request_id=submit.request_id,
            token_ids=[token],
            logprobs=[_logprobs(token, sampling.logprobs)]
            if sampling.logprobs is not None
            else None,
            finish=finish,
            stop_token=token if finish is Finish.STOP else None,
            cached_tokens=self.cached_tokens if first else None,
            prompt_logprobs=_prompt_logprobs(submit) if first else None,
        )


def _logprobs(token: int, top: int) -> TokenLogprobs:
    """The chosen token at -0.5, alternatives below it, one of them impossible."""
    alternatives = [(token, -0.5), *((token + i, -1.0 - i) for i in range(1, top))]
    if top > 1:
        alternatives[-1] = (alternatives[-1][0], float("-inf"))
    return TokenLogprobs(logprob=-0.5, top=alternatives[:top])


def _prompt_logprobs(submit: Submit) -> list[TokenLogprobs | None] | None:
    top = submit.sampling.prompt_logprobs
    if top is None:
        return None
    ids = [
        int.from_bytes(submit.token_ids[i : i + 4], "little")
        for i in range(0, len(submit.token_ids), 4)
    ]
    return [None, *(_logprobs(token, top) for token in ids[1:])]
