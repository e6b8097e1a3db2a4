"""A rank other than 0: it runs the plans it is sent, in order, and decides nothing."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import zmq

from radixgrove.service import logs
from radixgrove.worker.engine.leader import (
    Forward,
    Launch,
    Order,
    Progress,
    Sample,
    plans_address,
    progress_address,
)
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import PhaseReport
from radixgrove.worker.parallel.rendezvous import leave
from radixgrove.worker.runtime import Runtime

logger = logging.getLogger(__name__)

_ORPHAN_CHECK_MS = 1000


def run_follower(runtime_dir: Path, rank: int) -> int:
    """Run rank `rank` of the worker in `runtime_dir` until rank 0 ends it; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    runtime = Runtime.load(runtime_dir)
    logs.configure(runtime.settings.log_level, json=runtime.settings.log_json)
    logs.LevelFile(runtime_dir).follow()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers = context.socket(zmq.PUSH)
    answers.connect(progress_address(runtime_dir))
    try:
        runner, _ = build_rank(runtime.settings, runtime.model_dir, _log, runtime_dir, rank)
        plans = context.socket(zmq.PULL)
        plans.set_hwm(2 * (runner.info.depth + 1))
        plans.connect(plans_address(runtime_dir, rank))
        _follow(runner, plans, answers, rank)
        plans.close(0)
        runner.close()
        leave(runner.group)
    except Exception as error:
        logger.exception("rank %d failed", rank)
        answers.send(msgspec.msgpack.encode(Progress(rank, -1, str(error))))
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} failed: {error}"))
        return 1
    finally:
        answers.close(linger=1000)
        context.term()
    return 0


def _log(phase: PhaseReport) -> None:
    logger.debug("%s", phase.message)


def _follow(
    runner: Runner, plans: zmq.Socket[bytes], answers: zmq.Socket[bytes], rank: int
) -> None:
    """Carry out each order as it comes; collect the oldest step when no more may be in flight."""
    decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
    parent = os.getppid()
    orders = flying = 0
    while True:
        if not plans.poll(_ORPHAN_CHECK_MS):
            if os.getppid() != parent:
                raise RuntimeError("the worker is gone")
            continue
        frame = plans.recv()
        if not frame:
            return
        order = decoder.decode(frame)
        if flying == runner.info.depth and not isinstance(order, Sample):
            runner.collect()
            flying -= 1
        match order:
            case Launch(plan):
                runner.launch(plan)
            case Forward(plan):
                runner.forward(plan)
            case Sample(masked, masks):
                if masked:
                    given = np.frombuffer(masks, dtype=np.int32).reshape(len(masked), -1)
                    runner.masks(*given.shape)[:] = given
                runner.sample(masked)
        flying += not isinstance(order, Forward)
        orders += 1
        answers.send(msgspec.msgpack.encode(Progress(rank, orders)))
