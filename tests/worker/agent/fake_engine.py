"""A process with the fake engine, for the agent's tests: it pulses, and misbehaves on request.

Run as `python -m fake_engine RUNTIME_DIR RANK`. Files in the runtime directory's parent steer it:
`chatty` makes it print 2 MB, `die-at-start` makes it exit with an error, `load-forever` keeps it
from getting ready, `fail-at-end` makes SIGTERM find it with an error. A message `Abort` of one of
`_STEPS` makes it announce a step of so many seconds and never finish it. What it receives is
appended to `engine-heard` there.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from radixgrove.service import logs
from radixgrove.worker.engine.links import tell_joined
from radixgrove.worker.messages import (
    Abort,
    EngineInfo,
    EngineState,
    PhaseReport,
    Stats,
    ToEngine,
)
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.runtime import Runtime
from tests.worker.fake_engine import FakeEngine

_STEPS = {"long-step": 1.0, "step-of-a-minute": 60.0}
INFO = EngineInfo(
    num_pages=64,
    page_size=16,
    max_model_len=512,
    max_running=4,
    vocab_size=1000,
    dtype="float32",
    device="cpu",
    weights_bytes=1_000_000,
    kv_bytes_per_token=1024,
    attention_backend="torch",
    prefill_tokens_per_second=100.0,
    kv_dtype="fp8_e4m3",
    host_pages=640,
    host_tokens_per_second=5000.0,
)

PULSE = Stats(
    state=EngineState.READY,
    ticks=0,
    steps=0,
    step_remaining=None,
    pages_total=64,
    host_pages_total=640,
)


def fail(*_: Any) -> None:
    raise RuntimeError("another rank is silent")


def main() -> None:
    directory = Path(sys.argv[1])
    rank = int(sys.argv[2])
    notes = directory.parent
    runtime = Runtime.load(directory)
    logs.LevelFile(directory).follow()
    if (notes / "die-at-start").exists():
        raise RuntimeError("out of imaginary memory")
    if (notes / "chatty").exists():
        for number in range(20_000):
            print(f"line {number}", "x" * 100, flush=True)
    while (notes / "load-forever").exists():
        time.sleep(1)
    if (notes / "fail-at-end").exists():
        signal.signal(signal.SIGTERM, fail)
    tell_joined(runtime)
    place = Layout.of(runtime.settings).place(rank)
    if not place.leads:
        while True:
            time.sleep(1)
    peers = [runtime.agent_socket(place.member)]
    engine = FakeEngine(runtime, lambda _: [], peers, PULSE, member=place.member)
    engine.infos.put(PhaseReport(EngineState.LOADING, "reading weights", 0.5))
    engine.infos.put(INFO)

    def heard(message: ToEngine) -> None:
        with (notes / "engine-heard").open("a") as file:
            file.write(f"{type(message).__name__}\n")
        if isinstance(message, Abort) and message.request_id in _STEPS:
            engine.hang(_STEPS[message.request_id])

    engine.heard = heard
    engine.run()


if __name__ == "__main__":
    main()
