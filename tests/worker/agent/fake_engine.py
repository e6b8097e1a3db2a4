"""An engine without a model, for the agent's tests: it starts, pulses, and misbehaves on request.

Run as `python -m fake_engine RUNTIME_DIR RANK`. Files in the runtime directory's parent steer it:
`chatty` makes it print 2 MB, `die-at-start` makes it exit with an error. A message `Abort` of one
of `_STEPS` makes it announce a step of so many seconds and never finish it. What it receives is
appended to `engine-heard` there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import zmq

from radixgrove.service import logs
from radixgrove.worker.messages import (
    Abort,
    EngineInfo,
    EngineState,
    PhaseReport,
    Stats,
    ToAgent,
    ToEngine,
)
from radixgrove.worker.runtime import Runtime

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
    if rank > 0:
        while True:
            time.sleep(1)
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(runtime.engine_socket)
    agent = context.socket(zmq.PUSH)
    agent.connect(runtime.agent_socket)
    decoder = msgspec.msgpack.Decoder(ToEngine)

    def tell(message: ToAgent) -> None:
        agent.send(msgspec.msgpack.encode(message))

    tell(PhaseReport(EngineState.LOADING, "reading weights", 0.5))
    tell(INFO)
    ticks = 0
    deadline = None
    while True:
        ticks += deadline is None
        state = EngineState.READY
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        tell(
            Stats(
                state=state,
                ticks=ticks,
                steps=0,
                step_remaining=remaining,
                pages_total=64,
                host_pages_total=640,
            )
        )
        if inbox.poll(100):
            message = decoder.decode(inbox.recv())
            with (notes / "engine-heard").open("a") as file:
                file.write(f"{type(message).__name__}\n")
            if isinstance(message, Abort) and message.request_id in _STEPS:
                deadline = time.monotonic() + _STEPS[message.request_id]


if __name__ == "__main__":
    main()
