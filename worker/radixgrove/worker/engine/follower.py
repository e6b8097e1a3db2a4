"""A rank that leads no member: it runs the plans it is sent, in order, and decides nothing."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from queue import Empty

import numpy as np
import torch

from radixgrove.protocol.model.config import ModelError
from radixgrove.service import logs
from radixgrove.worker.engine.ending import give_up
from radixgrove.worker.engine.group_links import FollowerLink
from radixgrove.worker.engine.links import tell_joined
from radixgrove.worker.engine.orders import Forward, Launch, Returned, Sample
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import PhaseReport
from radixgrove.worker.parallel.crew import meet
from radixgrove.worker.parallel.member import Member, StorePlace, form, leave, reach_store
from radixgrove.worker.parallel.rendezvous import JoinRefused, RankMissing
from radixgrove.worker.runtime import Runtime

logger = logging.getLogger(__name__)

# Between looks at whether a step has ended on the device; an order wakes sooner.
_POLL_SECONDS = 20e-6


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
        _follow(runner, group.link)
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


def _follow(runner: Runner, link: FollowerLink) -> None:
    """Carry out each order as it comes; collect the oldest step when no more may be in flight, or,
    where its results are the member's, when it has ended."""
    speaks = runner.member.speaks
    while True:
        if speaks and runner.has_ended:
            link.send_result(runner.collect())
            continue
        try:
            order = link.next_order(_POLL_SECONDS if speaks and runner.in_flight else None)
        except Empty:
            continue
        if order is None:
            return
        if runner.in_flight == runner.info.depth and not isinstance(order, Sample):
            runner.collect()
        match order:
            case Launch(plan, returned):
                _take_back(runner, returned)
                runner.launch(plan)
            case Forward(plan, returned):
                _take_back(runner, returned)
                runner.forward(plan)
            case Sample(masked, masks):
                if masked:
                    given = np.frombuffer(masks, dtype=np.int32).reshape(len(masked), -1)
                    runner.masks(*given.shape)[:] = given
                runner.sample(masked)
            case StorePlace():
                raise RuntimeError("the group has been formed already")
        link.carried_out()


def _take_back(runner: Runner, returned: list[Returned]) -> None:
    for each in returned:
        runner.take_back(each.rows, each.tokens)
