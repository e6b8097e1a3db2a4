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
    Refused,
    Stats,
    Submit,
    ToEngine,
    TokenLogprobs,
    Tokens,
)
from radixgrove.worker.runtime import Runtime


@dataclass
class _Running:
    submit: Submit
    script: list[int]
    position: int = 0


@dataclass
class FakeEngine:
    """Generates `script(submit)`, one token a step for every sequence, then EOS unless cut short.

    `step_seconds` slows it down, `paused` stops it between two tokens, `refuse` turns sequences
    away, `max_steps` lets every sequence get that many tokens before it stands still.
    """

    runtime: Runtime
    script: Callable[[Submit], list[int]]
    step_seconds: float = 0.0
    cached_tokens: int = 0
    refuse: Callable[[Submit], Refused | None] = lambda _: None
    submits: list[Submit] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    infos: queue.SimpleQueue[EngineInfo] = field(default_factory=queue.SimpleQueue)  # to be sent
    running: dict[str, _Running] = field(default_factory=dict)
    paused: threading.Event = field(default_factory=threading.Event)
    silent: threading.Event = field(default_factory=threading.Event)  # no Stats any more
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the sockets, as the kernel does for a process that died."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
            assert not self._thread.is_alive()

    def reset(self) -> None:
        self.step_seconds = 0.0
        self.cached_tokens = 0
        self.refuse = lambda _: None
        self.paused.clear()
        self.submits.clear()
        self.aborts.clear()

    # ---- the loop --------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        inbox = context.socket(zmq.PULL)
        inbox.bind(self.runtime.engine_socket)
        outbox = context.socket(zmq.PUSH)
        outbox.connect(self.runtime.frontend_socket(0))
        outbox.setsockopt(zmq.LINGER, 0)
        decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        ticks, last_stats = 0, 0.0
        while not self._stop.is_set():
            ticks += 1
            busy = bool(self.running) and not self.paused.is_set()
            outputs: list[Tokens | Refused] = []
            if inbox.poll(0 if busy else 5):
                outputs += self._take(decoder.decode(inbox.recv()))
            elif busy:
                outputs += self._step()
            if outputs:
                outbox.send(msgspec.msgpack.encode(Outputs(outputs)))
            while not self.infos.empty():
                outbox.send(msgspec.msgpack.encode(self.infos.get()))
            now = time.time()
            if now - last_stats > 0.1 and not self.silent.is_set():
                last_stats = now
                stats = Stats(
                    state=EngineState.READY,
                    ticks=ticks,
                    steps=ticks,
                    step_remaining=None,
                    running=len(self.running),
                    pages_total=100,
                    pages_free=60,
                    pages_evictable=30,
                )
                outbox.send(msgspec.msgpack.encode(stats))
        inbox.close(0)
        outbox.close(0)
        context.term()

    def _take(self, message: ToEngine) -> list[Tokens | Refused]:
        if isinstance(message, Submit):
            self.submits.append(message)
            refused = self.refuse(message)
            if refused is not None:
                return [refused]
            self.running[message.request_id] = _Running(message, self.script(message))
        elif isinstance(message, Abort):
            self.aborts.append(message.request_id)
            if self.running.pop(message.request_id, None) is not None:
                return [Tokens(request_id=message.request_id, token_ids=[], finish=Finish.ABORT)]
        return []

    def _step(self) -> list[Tokens | Refused]:
        if self.step_seconds:
            self._stop.wait(self.step_seconds)
        return [self._advance(entry) for entry in list(self.running.values())]

    def _advance(self, entry: _Running) -> Tokens:
        submit, sampling = entry.submit, entry.submit.sampling
        first = entry.position == 0
        ended = entry.position >= len(entry.script)
        token = sampling.stop_token_ids[0] if ended else entry.script[entry.position]
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
