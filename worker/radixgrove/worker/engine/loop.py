"""The engine process: `python -m radixgrove.worker.engine.loop RUNTIME_DIR RANK`.

One thread owns scheduler and executor and turns one loop: take messages, plan and launch steps up
to the executor's depth, collect the oldest, deliver its tokens, send a pulse. Nothing here waits
for a frontend or the agent: what they do not take in time is dropped and made good.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import logs
from radixgrove.service.metric_files import reserve_room
from radixgrove.worker.cache.identity import block_hasher, cache_namespace
from radixgrove.worker.engine.ending import run_to_end
from radixgrove.worker.engine.links import Links, tell_joined
from radixgrove.worker.engine.metrics import EngineMetrics, PhaseClock
from radixgrove.worker.engine.prefill_rate import PrefillRate
from radixgrove.worker.engine.step_time import StepTimeFit
from radixgrove.worker.engine.steps import step_allowance
from radixgrove.worker.engine.tokenizer import read_ahead
from radixgrove.worker.messages import (
    Abort,
    Admitted,
    CacheEvents,
    CacheSnapshot,
    EngineInfo,
    EngineState,
    FlushCache,
    Outputs,
    Peek,
    PhaseReport,
    PublishSnapshot,
    Read,
    Refused,
    Submit,
    SubmitChoices,
    ToEngine,
    Tokens,
)
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.plan import Executor, StepPlan
from radixgrove.worker.runtime import Runtime
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.grammars import LoadTokenizer
from radixgrove.worker.scheduler.scheduler import Scheduler
from radixgrove.worker.scheduler.step_time import StepWork

logger = logging.getLogger(__name__)

Report = Callable[[PhaseReport], None]
# Settings, model directory, where progress goes, runtime directory (where several ranks meet).
Build = Callable[[WorkerSettings, Path, Report, Path], tuple[Executor, EngineInfo]]

PULSE_SECONDS = 0.2
_MESSAGES_A_TURN = 512
_NOTHING_POSSIBLE_SECONDS = 0.01  # requests wait, but none can go on
_COPYING_SECONDS = 0.001  # a copy or a grammar is under way, and a request may wait for its end


@dataclass(slots=True)
class _Launched:
    tokens: int
    prefill: int  # of them
    allowance: float  # seconds from the moment it is the oldest in flight
    work: StepWork


class Engine:
    """The loop of a member's leader over an executor that is ready. `run` until `stop`."""

    def __init__(
        self,
        settings: WorkerSettings,
        links: Links,
        executor: Executor,
        info: EngineInfo,
        load_tokenizer: LoadTokenizer,
    ) -> None:
        self._executor = executor
        self._depth = executor.info.depth
        self._agent = links.agent
        self._frontends = links.frontends
        self._inbox = links.inbox
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._metrics = EngineMetrics()
        self._rate = PrefillRate(settings.step_limits(on_cpu=info.device == "cpu").max_step_tokens)
        self._clock = PhaseClock()
        self._stopping = False
        self._busy = False
        self._collected = False  # in this turn, a step before the one that was launched
        self._forwarded = False  # a step, which is yet to be sampled
        self._ticks = 0
        self._sequence = 0  # of cache event batches
        self._flights: deque[_Launched] = deque()
        self._oldest_since = 0.0
        self._pulse_at = 0.0
        self._told_deadline = -math.inf  # of the last pulse; without one when it was idle

        on_cpu = info.device == "cpu"
        namespace = cache_namespace(settings, info.dtype, info.kv_dtype)
        config = SchedulerConfig.resolve(
            settings,
            executor.info,
            on_cpu=on_cpu,
            namespace=namespace,
            prefill_rate=info.prefill_tokens_per_second,
            host_rate=info.host_tokens_per_second,
        )
        # Without Redis no router follows the cache, and hashing it would be for nothing.
        wants_events = settings.redis_url is not None and settings.prefix_cache
        hasher = functools.partial(block_hasher, settings) if wants_events else None
        self._scheduler = Scheduler(config, hasher, load_tokenizer)
        bounded = config.max_step_seconds is not None
        self._step_time = StepTimeFit(info.prefill_tokens_per_second) if bounded else None
        self._allowance = step_allowance(settings, info)
        info = msgspec.structs.replace(
            info, max_model_len=config.max_model_len, max_running=config.max_running
        )
        self._agent.send(info)
        for frontend in self._frontends:
            frontend.send(info)
        self._pulse(time.monotonic())

    def stop(self) -> None:
        """End the loop after its current turn; safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Raises RuntimeError when a step failed: the engine is then of no more use."""
        while not self._stopping:
            self._turn()
        self._abort_all()

    def _turn(self) -> None:
        self._ticks += 1
        self._receive()
        self._clock.end("receive")
        self._collected = False
        if self._forwarded:
            self._sample()
        else:
            self._launch()
        self._clock.end("schedule")
        self._busy = bool(self._flights)
        # What came while a step was launched is delivered first: the step is under way.
        if self._busy and not self._collected and not self._forwarded:
            self._pulse_if_due(time.monotonic())
            self._clock.end("pulse")
            self._collect()
            self._clock.end("complete")
        self._deliver()
        self._clock.end("deliver")
        self._pulse_if_due(time.monotonic())
        self._clock.end("pulse")

    def _abort_all(self) -> None:
        for index in range(len(self._frontends)):
            for request_id in self._scheduler.requests_of(index):
                self._scheduler.abort(request_id)
        self._deliver()

    # ---- messages in -----------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle what has arrived; when the last turn computed nothing, wait for it a while."""
        if not self._busy:
            seconds = self._pulse_at + PULSE_SECONDS - time.monotonic()
            if self._scheduler.copies_in_flight or self._scheduler.grammars.building:
                seconds = min(seconds, _COPYING_SECONDS)
            elif self._scheduler.has_work:
                seconds = min(seconds, _NOTHING_POSSIBLE_SECONDS)
            if seconds > 0:
                self._inbox.poll(math.ceil(seconds * 1000))
        now = time.monotonic()
        for _ in range(_MESSAGES_A_TURN):
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                logger.error("dropped a message that is none of ours: %s", error)
                continue
            self._handle(message, now)

    def _handle(self, message: ToEngine, now: float) -> None:
        match message:
            case Submit():
                self._submit(message, now)
            case SubmitChoices():
                self._submit(message.first, now)
                for request_id, sampling in message.others:
                    choice = msgspec.structs.replace(
                        message.first, request_id=request_id, sampling=sampling
                    )
                    self._submit(choice, now)
            case Read():
                if 0 <= message.frontend < len(self._frontends):
                    self._frontends[message.frontend].has_read(message.size)
            case Abort():
                self._scheduler.abort(message.request_id)
            case FlushCache():
                self._scheduler.flush_cache()
            case PublishSnapshot():
                self._publish_snapshot()
            case Peek():
                self._answer(message)

    def _answer(self, peek: Peek) -> None:
        """One that gets no answer in time is placed without."""
        if 0 <= peek.frontend < len(self._frontends):
            self._frontends[peek.frontend].send(self._scheduler.peek(peek))

    def _submit(self, submit: Submit, now: float) -> None:
        if not 0 <= submit.frontend < len(self._frontends):
            logger.error("a request of frontend %d, which does not exist", submit.frontend)
            return
        if self._frontends[submit.frontend].is_behind:
            self._frontends[submit.frontend].defer_finals({submit.request_id})
            return
        try:
            self._scheduler.submit(submit, now)
        except Exception:
            # Whatever is wrong with this one is its own: the others go on.
            logger.exception("request %s could not be queued", submit.request_id)
            self._scheduler.fail(submit, "The request could not be processed.")

    # ---- steps -----------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Fill the executor up to its depth, or up to a step that awaits tokens for its masks."""
        while len(self._flights) < self._depth and not self._forwarded:
            plan = self._plan()
            if plan is None:
                return
            self._start(plan)

    def _plan(self) -> StepPlan | None:
        now = time.monotonic()
        self._scheduler.copies_ended(*self._executor.copies_ended())
        plan = self._scheduler.schedule(now)
        if plan is None:
            return None
        if not self._flights:
            self._oldest_since = now
        tokens = plan.num_tokens
        prefill = sum(chunk.length for chunk in plan.prefills)
        work = self._scheduler.work
        self._flights.append(_Launched(tokens, prefill, self._allowance(tokens), work))
        self._clock.end("schedule")
        return plan

    def _start(self, plan: StepPlan) -> None:
        """Launch the newest step; under masks that await tokens, its forward alone."""
        self._pulse_if_due(time.monotonic())  # on a CPU the launch itself computes
        self._clock.end("pulse")
        if not self._scheduler.masked:
            self._executor.launch(plan)
            self._clock.end("launch")
            return
        self._executor.forward(plan)
        self._clock.end("launch")
        self._forwarded = True
        if not self._scheduler.masks_await_tokens:
            self._sample_now()

    def _sample(self) -> None:
        """Sample the step whose forward has been launched.

        Its masks need the tokens of the step before, which are collected first. The next step is
        planned while the device computes, and launched behind this one.
        """
        ahead = self._plan()
        while self._scheduler.masks_await_tokens:
            self._collect()
            self._collected = True
            self._clock.end("complete")
        self._sample_now()
        if ahead is not None:
            self._start(ahead)

    def _sample_now(self) -> None:
        self._forwarded = False
        started = time.monotonic()
        masked = self._scheduler.fill_masks(self._executor.masks)
        self._metrics.observe_masks(time.monotonic() - started)
        self._clock.end("mask")
        self._executor.sample(masked)
        self._clock.end("launch")

    def _collect(self) -> None:
        result = self._executor.collect()
        self._clock.end("collect")
        now = time.monotonic()
        launched = self._flights.popleft()
        if launched.tokens:  # a plan may hold copies only
            self._metrics.observe_step(now - self._oldest_since, launched.tokens)
            self._rate.observe(now - self._oldest_since, launched.prefill)
            if self._step_time is not None:
                self._step_time.observe(launched.work, now - self._oldest_since)
                self._scheduler.step_time = self._step_time.time
        self._oldest_since = now
        self._scheduler.complete(result)

    @property
    def _deadline(self) -> float | None:
        """When the oldest step in flight must have ended."""
        return self._oldest_since + self._flights[0].allowance if self._flights else None

    # ---- messages out ----------------------------------------------------------------------------

    def _deliver(self) -> None:
        for index, items in self._scheduler.take_outputs().items():
            if not self._frontends[index].send(Outputs(items)):
                self._give_up_on(index, items)
        self._tell_admitted()
        self._publish_events()

    def _tell_admitted(self) -> None:
        if admitted := self._scheduler.take_admitted():
            self._agent.send(Admitted(admitted))

    def _give_up_on(self, index: int, lost: list[Tokens | Refused]) -> None:
        """A frontend does not read: end its requests rather than compute what is never sent."""
        live = self._scheduler.requests_of(index)
        for request_id in live:
            self._scheduler.abort(request_id)
        # What the aborts say is all there is by now; the frontend hears one end, the owed one.
        self._scheduler.take_outputs()
        frontend = self._frontends[index]
        if not frontend.is_behind:
            logger.error("frontend %d is too far behind: ended its %d requests", index, len(live))
        frontend.defer_finals({*live, *(item.request_id for item in lost)})

    def _publish_events(self) -> None:
        events = self._scheduler.take_cache_events()
        if events:
            # A batch that is dropped here leaves a gap, after which the agent asks for a snapshot.
            self._sequence += 1
            self._agent.send(CacheEvents(self._sequence, events))

    def _publish_snapshot(self) -> None:
        self._publish_events()
        for events in self._scheduler.cache_snapshot():
            self._agent.send(CacheSnapshot(self._sequence, events, last=False))
        self._agent.send(CacheSnapshot(self._sequence, [], last=True))

    def _pulse_if_due(self, now: float) -> None:
        """About five times a second, and at once when a step begins that may end much later than
        was said last: the frontends that wait for the next pulse have to know of it."""
        deadline = self._deadline
        begins = deadline is not None and deadline > self._told_deadline + PULSE_SECONDS
        if begins or now - self._pulse_at >= PULSE_SECONDS:
            self._pulse(now)

    def _pulse(self, now: float) -> None:
        self._pulse_at = now
        deadline = self._deadline
        self._told_deadline = deadline if deadline is not None else -math.inf
        remaining = None if deadline is None else max(0.0, deadline - now)
        stats = self._scheduler.stats(EngineState.READY, self._ticks, remaining)
        stats.prefill_rate = self._rate.tokens_per_second
        self._tell_admitted()
        self._agent.send(stats)
        for frontend in self._frontends:
            frontend.send(stats)
            frontend.flush_finals()
        self._metrics.follow(stats, self._clock)
        self._metrics.follow_experts(self._executor.expert_tokens())
        if logger.isEnabledFor(logging.DEBUG):
            self._scheduler.check()


def run(
    directory: Path, build: Build, refusals: tuple[type[Exception], ...] = (), rank: int = 0
) -> int:
    """Run a leader of the worker in `directory` until SIGTERM; returns the exit status.

    `refusals` are errors of `build` with a text for users: they are logged without a traceback.
    """
    runtime = Runtime.load(directory)
    settings = runtime.settings
    logs.configure(settings.log_level, json=settings.log_json)
    reserve_room()
    logs.count_drops()
    logs.LevelFile(directory).follow()
    signal.signal(signal.SIGTERM, _exit_at_once)
    links = Links(runtime, Layout.of(settings).place(rank).member)
    executor: Executor | None = None
    doing = "start"
    # Beside the weights, which take longer: requests would wait for it.
    load_tokenizer = read_ahead(runtime.model_dir)
    try:
        executor, info = build(settings, runtime.model_dir, links.report, directory)
        # What the start has built lives to the end: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        engine = Engine(settings, links, executor, info, load_tokenizer)
        tell_joined(runtime)
        signal.signal(signal.SIGTERM, lambda *_: engine.stop())
        doing = "run"
        engine.run()
    except Exception as error:
        if not isinstance(error, refusals):
            logger.exception("the engine failed")
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} failed to {doing}: {error}"))
        return 1
    finally:
        if executor is not None:
            executor.close()
        links.close()
    return 0


def _exit_at_once(*_: object) -> None:
    """Until there are requests to end, SIGTERM need not wait for anything."""
    sys.exit(0)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not arguments[1].isdecimal():
        print("usage: python -m radixgrove.worker.engine.loop RUNTIME_DIR RANK", file=sys.stderr)
        return 2
    directory, rank = Path(arguments[0]), int(arguments[1])
    # Imported here: both bring torch, which the scheduler's side of this module does not need.
    if not Layout.of(Runtime.load(directory).settings).place(rank).leads:
        from radixgrove.worker.engine.follower import run_follower

        return run_follower(directory, rank)
    from radixgrove.protocol.model.config import ModelError
    from radixgrove.worker.engine.executor import build_executor

    return run(directory, functools.partial(build_executor, rank=rank), (ModelError,), rank)


if __name__ == "__main__":
    run_to_end(functools.partial(main, sys.argv[1:]))
