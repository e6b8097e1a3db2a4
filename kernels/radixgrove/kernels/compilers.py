"""Processes that compile Triton's kernels, each for a thread that waits for it.

A compilation holds Python's lock for much of its time: the threads of a process get no further than
five or so at once. So a thread that comes to launch a new kernel gives what Triton would compile to
a process without a GPU, which leaves the result in Triton's cache on disk. There the thread finds
it, since it asks by the same source, signature and options. What a process fails to compile, the
thread compiles itself.

    python -m radixgrove.kernels.compilers ARCHITECTURE DESCRIPTOR...

runs one such process for each descriptor, a socket on which every line is a kernel, until that is
closed: when this process ends, in whatever way, they do.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)

# Where fewer are, threads are as good, and the memory of processes is saved.
_FEWEST_CORES = 8
_MOST = 16
_PATIENCE_SECONDS = 60.0  # with one kernel; the slowest takes about five
_ENDING_SECONDS = 20.0
_NICE = 10  # loading weights comes first


def threads_for(cores: int) -> int:
    """How many threads compile well at once on so many cores."""
    return min(_MOST if cores >= _FEWEST_CORES else 8, max(1, cores))


@contextmanager
def compiling_apart(cores: int) -> Iterator[None]:
    """Meanwhile kernels that are launched here for the first time are compiled by processes.

    Args:
        cores: that this process may use; with few of them nothing is different.
    """
    if cores < _FEWEST_CORES:
        yield
        return
    from triton import knobs
    from triton.runtime import driver

    architecture = driver.active.get_current_target().arch
    with ExitStack() as stack:
        try:
            compilers = stack.enter_context(Compilers(threads_for(cores), architecture))
        except OSError as error:  # no more processes, or descriptors
            log.warning("kernels are compiled in threads alone, which takes longer: %s", error)
        else:
            before = knobs.runtime.jit_cache_hook
            stack.callback(setattr, knobs.runtime, "jit_cache_hook", before)
            knobs.runtime.jit_cache_hook = compilers.before_compiling
        yield


class Compilers:
    """The processes, which this object starts and ends; any thread may ask them."""

    def __init__(self, count: int, architecture: int) -> None:
        """
        Args:
            architecture: that they compile for, 90 for compute capability 9.0.
        """
        self._lock = threading.Lock()
        self._asked: dict[str, threading.Event] = {}
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        pairs = [socket.socketpair() for _ in range(count)]
        self._channels = [ours for ours, _ in pairs]
        theirs = [channel for _, channel in pairs]
        descriptors = [channel.fileno() for channel in theirs]
        numbers = map(str, (architecture, *descriptors))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "radixgrove.kernels.compilers", *numbers],
                pass_fds=descriptors,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except BaseException:
            self._close_channels()
            raise
        finally:
            for channel in theirs:
                channel.close()
        for channel in self._channels:
            channel.settimeout(_PATIENCE_SECONDS)
            self._free.put(channel)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_channels()  # at which they end, after what they compile now
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def before_compiling(self, **event: Any) -> bool:
        """Triton's hook: False, which lets it look into its cache and compile what is not there.

        The very first kernel is compiled here: the processes are still being started then.
        """
        kernel, what = event["fn"], event["compile"]["specialization_data"]
        with self._lock:
            known, done = bool(self._asked), self._asked.get(what)
            own = done is None
            if done is None:
                done = self._asked[what] = threading.Event()
        if not own:  # another thread wants the same
            done.wait(_PATIENCE_SECONDS)
            return False
        try:
            if known:
                self._ask(kernel.module, kernel.name, what)
        finally:
            done.set()
        return False

    def _ask(self, module: str, name: str, what: str) -> None:
        """Have it compiled, if a process is free; one that fails to answer is not asked again."""
        with suppress(queue.Empty, OSError):
            channel = self._free.get_nowait()
            channel.sendall(json.dumps([module, name, what]).encode() + b"\n")
            if channel.recv(1):
                self._free.put(channel)


class CompileOnly:
    """As much of Triton's driver as compiling needs; nothing can be launched."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def main(arguments: list[str]) -> None:
    from triton.runtime import driver

    architecture, *descriptors = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the process that asks, too
    os.nice(_NICE)
    driver.set_active(CompileOnly(architecture))
    import_module("radixgrove.kernels.ops")  # with nearly all kernels, before there are many of us
    channels = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for own in channels:
        if not os.fork():
            for channel in channels:
                if channel is not own:
                    channel.close()
            _serve(own)
            os._exit(0)
    for channel in channels:
        channel.close()  # that only its process has, whose end is the other side's news
    for _ in channels:
        os.wait()
    os._exit(0)  # torch would take a while to end


def _serve(channel: socket.socket) -> None:
    for line in channel.makefile("rb"):
        module, name, what = json.loads(line)
        with suppress(Exception):  # it fails again where it was asked for, and is seen there
            getattr(import_module(module), name).preload(what)
        channel.sendall(b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
