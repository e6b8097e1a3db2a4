"""CPU time of one frontend process per streamed token, and where it goes.

    python -m benchmarks.load.frontend_streams --streams 64 256 --profile 25

A real frontend before an engine that only sends tokens, `--rate` steps a second, one token a step
to each stream. Clients read and drop. A core divided by the time per token is what one frontend
sustains. `--profile` shows the costliest functions of a second, slower run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pstats
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from benchmarks import results
from benchmarks.load.worker_process import request, write_model
from radixgrove.cli.redis_server import free_port
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.messages import (
    EngineState,
    Finish,
    Outputs,
    Stats,
    Submit,
    ToEngine,
    ToFrontend,
    Tokens,
)
from radixgrove.worker.runtime import Runtime

MODEL = "qwen3-0.6b"
DEADLINE = 60.0
SETTLED = 20  # steps before the clock starts


class TokenSource:
    """The engine's side of the sockets."""

    def __init__(self, runtime: Runtime, vocab_size: int) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(runtime.engine_socket())
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(runtime.frontend_socket(0))
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._steps = self._ticks = 0

    def pulse(self) -> None:
        self._ticks += 1  # frontends give up an engine without new ticks
        self._send(
            Stats(
                state=EngineState.READY, ticks=self._ticks, steps=self._steps, step_remaining=None
            )
        )

    def accept(self, count: int) -> list[str]:
        """Ids of the next `count` requests."""
        ids: list[str] = []
        end = time.monotonic() + DEADLINE
        while len(ids) < count and time.monotonic() < end:
            self.pulse()
            while self._inbox.poll(100):
                message = self._decoder.decode(self._inbox.recv())
                if isinstance(message, Submit):
                    ids.append(message.request_id)
        if len(ids) < count:
            raise RuntimeError(f"{len(ids)} requests instead of {count}")
        return ids

    def step(self, ids: list[str], *, last: bool = False) -> None:
        self._steps += 1
        choose = self._random.randrange
        finish = Finish.LENGTH if last else None
        self._send(
            Outputs(
                [
                    Tokens(request_id=id_, token_ids=[choose(self._vocab_size)], finish=finish)
                    for id_ in ids
                ]
            )
        )
        if self._steps % 10 == 0:
            self.pulse()

    def _send(self, message: ToFrontend) -> None:
        self._outbox.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Readers:
    """Connections that send one request each and drop what comes, on a thread of their own."""

    def __init__(self, port: int, count: int) -> None:
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4000, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n"
        request = head.encode() + b"content-type: application/json\r\n\r\n" + data
        self._selector = selectors.DefaultSelector()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self._open = count
        for connection in self._sockets:
            connection.sendall(request)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, connection)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._open:
            for key, _ in self._selector.select():
                data = key.data.recv(1 << 16)
                # Neither data nor the size of a piece of it ends like the last piece.
                if not data or data.endswith(b"\n0\r\n\r\n") or data == b"0\r\n\r\n":
                    self._selector.unregister(key.data)
                    self._open -= 1

    def join(self) -> None:
        """Wait for the end of all streams."""
        self._thread.join(DEADLINE)
        if self._thread.is_alive():
            raise RuntimeError(f"{self._open} streams did not end")
        for connection in self._sockets:
            connection.close()


@contextlib.contextmanager
def frontend(command: list[str]) -> Iterator[tuple[TokenSource, int, psutil.Process]]:
    """A frontend started by `command` and its arguments: its engine, port and process."""
    with tempfile.TemporaryDirectory(prefix="rg-") as name:
        directory = Path(name)
        vocab_size = write_model(results.CONFIGS / MODEL, directory)
        settings = WorkerSettings(
            model=name, served_model_name=[MODEL], port=free_port(), log_level="warning"
        )
        runtime = Runtime(directory, settings, directory)
        runtime.metrics_dir.mkdir()
        runtime.write()
        source = TokenSource(runtime, vocab_size)
        process = subprocess.Popen(
            [*command, "-m", "radixgrove.worker.frontend", name, "0"],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(runtime.metrics_dir)},
        )
        try:
            wait_until_ready(source, settings.port)
            yield source, settings.port, psutil.Process(process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE)
        finally:
            process.kill()
            process.wait()
            source.close()


def wait_until_ready(source: TokenSource, port: int) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        source.pulse()
        with contextlib.suppress(OSError):
            if request(port, "GET", "/readyz")[0] == 200:
                return
        time.sleep(0.05)
    raise RuntimeError("the frontend was not ready in time")


def stream(
    source: TokenSource, port: int, process: psutil.Process, streams: int, steps: int, rate: float
) -> float:
    """CPU seconds of the frontend per token."""
    wait_until_ready(source, port)  # its last pulse may be long ago
    readers = Readers(port, streams)
    ids = source.accept(streams)
    begin, before = time.monotonic(), 0.0
    for number in range(SETTLED + steps):
        if number == SETTLED:
            before = _seconds(process)
        source.step(ids)
        time.sleep(max(0.0, begin + (number + 1) / rate - time.monotonic()))
    time.sleep(0.2)
    seconds = _seconds(process) - before
    source.step(ids, last=True)
    readers.join()
    return seconds / (streams * steps)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def show_profile(streams: int, options: argparse.Namespace) -> None:
    with tempfile.NamedTemporaryFile(suffix=".profile") as file:
        command = [sys.executable, "-m", "cProfile", "-o", file.name]
        with frontend(command) as (source, port, process):
            stream(source, port, process, streams, options.steps, options.rate / 2)
        pstats.Stats(file.name).sort_stats("tottime").print_stats(options.profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=40.0, help="steps a second")
    parser.add_argument("--runs", type=int, default=2, help="the better counts")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS")
    options = parser.parse_args()
    with frontend([sys.executable]) as (source, port, process):
        for streams in options.streams:
            seconds = min(
                stream(source, port, process, streams, options.steps, options.rate)
                for _ in range(options.runs)
            )
            each = seconds * 1e6
            print(f"{streams} streams: {each:.1f} us/token, {1 / seconds:,.0f} tokens/s a core")
            common: dict[str, Any] = {
                "benchmark": "frontend_streams",
                "workload": f"{streams} streams",
                "model": MODEL,
                "subject": "radixgrove",
                "device": "cpu",
            }
            results.record(common | {"metric": "cpu", "value": round(each, 2), "unit": "us/token"})
    if options.profile:
        show_profile(max(options.streams), options)


if __name__ == "__main__":
    main()
