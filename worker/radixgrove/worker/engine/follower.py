"""A rank that leads no member: it runs the plans it is sent, in order, and decides nothing."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import deque
from pathlib import Path
from queue import Empty

import numpy as np
import torch

from radixgrove.protocol.model.config import ModelError
from radixgrove.service import logs
from radixgrove.worker.engine.agreement import plan_digest, samples_digest
from radixgrove.worker.engine.ending import give_up
from radixgrove.worker.engine.group_links import FollowerLink
from radixgrove.worker.engine.links import tell_joined
from radixgrove.worker.engine.orders import (
    Compared,
    Forward,
    Launch,
    Returned,
    Sample,
    Step,
)
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import PhaseReport
from radixgrove.worker.parallel.crew import meet
from radixgrove.worker.parallel.member import Member, StorePlace, form, leave, reach_store
from radixgrove.worker.parallel.rendezvous import JoinRefused, RankMissing
from radixgrove.worker.plan import StepPlan
from radixgrove.worker.runtime import Runtime

logger = logging.getLogger(__name__)


def run_follower(runtime_dir: Path, rank: int) -> int:
    """Run rank `rank` of the worker in `runtime_dir` until its leader ends it; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    runtime = Runtime.load(runtime_dir)
    settings = runtime.settings
    logs.configure(settings.log_level, json=settings.log_json)
    logs.LevelFile(runtime_dir).follow()
    group = _Group(runtime, rank)
    try:
        runner, _ = build_rank(settings, runtime.model_dir, _log, rank, group.form)
        tell_joined(runtime)
        _Follower(runner, group.link, compare=settings.compare_ranks).run()
        group.close()
        runner.close()
        leave()
    except Exception as error:
        if not isinstance(error, ModelError | RankMissing | JoinRefused):
            logger.exception("rank %d failed", rank)
        group.fail(error)
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} failed: {error}"))
        return 1
    finally:
        group.close()
    return 0


class _Group:
    """This rank's side of a member's start, and its link to the leader afterwards."""

    def __init__(self, runtime: Runtime, rank: int) -> None:
        self._runtime = runtime
        self._rank = rank
        self._link: FollowerLink | None = None

    @property
    def link(self) -> FollowerLink:
        assert self._link is not None, "a rank that does not lead is one of several"
        return self._link

    def form(self, device: torch.device) -> Member:
        """Join the leader, then torch's groups, once it has opened the store for them."""
        runtime = self._runtime
        crew = meet(runtime.settings, runtime.model_dir, runtime.directory, self._rank)
        self._link = link = FollowerLink(crew, give_up(self._rank))
        # From here on the leader says when it is over: it may still have requests to answer.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        place = link.next_order()
        if not isinstance(place, StorePlace):
            raise RankMissing(f"{crew.name(crew.leader)} ended the group")
        member = crew.place.member
        store = reach_store(crew.layout, member, runtime.directory, place)
        transport, address = runtime.settings.transport, crew.own_address
        joined = form(crew.layout, crew.place, device, store, transport, address)
        link.activity = joined.activity
        return joined

    def fail(self, error: Exception) -> None:
        if self._link is not None:
            self._link.fail(error)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def _log(phase: PhaseReport) -> None:
    logger.debug("%s", phase.message)


class _Follower:
    """Carries out each order as it comes."""

    def __init__(self, runner: Runner, link: FollowerLink, *, compare: bool) -> None:
        self._runner = runner
        self._link = link
        self._speaks = runner.member.speaks
        self._plans: deque[bytes] | None = deque() if compare else None  # digests, of steps
        warmed_up = runner.steps_ended
        link.steps_ended = lambda: runner.steps_ended - warmed_up

    def run(self) -> None:
        """Until the group ends. A step is collected when no more may be in flight, or, where its
        results are looked at, when it has ended."""
        runner, looks = self._runner, self._speaks or self._plans is not None
        while True:
            if looks and runner.has_ended:
                self._collect()
                continue
            try:
                order = self._link.next_order(wait=not (looks and runner.in_flight))
            except Empty:
                time.sleep(0)  # lets the thread run that receives orders
                continue
            if order is None:
                return
            if runner.in_flight == runner.info.depth and not isinstance(order, Sample):
                self._collect()
            self._carry_out(order)
            self._link.carried_out()

    def _collect(self) -> None:
        result = self._runner.collect()
        if self._speaks:
            self._link.send_result(result)
        if self._plans is not None:
            plan, samples = self._plans.popleft(), samples_digest(result.tokens)
            self._link.compare(Compared(result.step_id, plan, samples))

    def _carry_out(self, order: Step | StorePlace) -> None:
        runner = self._runner
        match order:
            case Launch(plan, returned):
                self._begin(plan, returned)
                runner.launch(plan)
            case Forward(plan, returned):
                self._begin(plan, returned)
                runner.forward(plan)
            case Sample(masked, masks):
                if masked:
                    given = np.frombuffer(masks, dtype=np.int32).reshape(len(masked), -1)
                    runner.masks(*given.shape)[:] = given
                runner.sample(masked)
            case StorePlace():
                raise RuntimeError("the group has been formed already")

    def _begin(self, plan: StepPlan, returned: list[Returned]) -> None:
        for each in returned:
            self._runner.take_back(each.rows, each.tokens)
        if self._plans is not None:
            self._plans.append(plan_digest(plan))
