"""Processes that compile Triton's kernels, each for a thread that waits for it.

A compilation holds Python's lock for much of its time: the threads of a process get no further than
five or so at once. So a thread that comes to launch a kernel which Triton's cache on disk lacks
gives what Triton would compile to a process without a GPU, which leaves the result there. The
thread finds it, since it asks by the same source, signature and options. What a process fails to
compile, the thread compiles itself.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

log = logging.getLogger(__name__)

# Where fewer are, threads are as good, and the memory of processes is saved.
_FEWEST_CORES = 8
_MOST = 16
_PROCESS_BYTES = 256 << 20  # of which about 150 MB are used
_PATIENCE_SECONDS = 60.0  # with one kernel; the slowest takes about five
_ENDING_SECONDS = 20.0
_NICE = 10  # loading weights comes first


@dataclass(frozen=True, slots=True)
class Room:
    """What compiling may take of the machine."""

    cores: int
    memory: int  # bytes, for processes

    @property
    def threads(self) -> int:
        """How many compile well at once."""
        return min(_MOST if self.cores >= _FEWEST_CORES else 8, max(1, self.cores))

    @property
    def processes(self) -> int:
        """One for each thread, if there is memory."""
        if self.cores < _FEWEST_CORES:
            return 0
        return min(self.threads, self.memory // _PROCESS_BYTES)


@contextmanager
def compiling_apart(device: torch.device, count: int, *, at_once: bool) -> Iterator[None]:
    """Meanwhile kernels that are launched on `device`, and not in Triton's cache, are compiled by
    processes.

    Args:
        count: of processes; with 0 nothing is different.
        at_once: start them now, since there will be such kernels; else for the first of them. It
            takes them seconds to import what they need.
    """
    if count < 1:
        yield
        return
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    with Compilers(count, device) as compilers, knobs.runtime.scope(), knobs.cache.scope():
        if at_once:
            compilers.start()
        knobs.runtime.jit_cache_hook = compilers.before_compiling
        manager = knobs.cache.manager_class or FileCacheManager
        knobs.cache.manager_class = _looking_again(manager, compilers.compile_missing)
        yield


def _looking_again(manager: Any, after: Callable[[], None]) -> Any:
    """A class of Triton's cache which, where it lacks a kernel, calls `after` and looks again."""

    def get_group(self: Any, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = manager.get_group(self, filename)
        if not found:
            after()
            found = manager.get_group(self, filename)
        return found

    return type(manager.__name__, (manager,), {"get_group": get_group})


class Compilers:
    """The processes, which this object starts and ends; any thread may ask them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._lock = threading.Lock()
        self._launched = threading.local()  # `kernel`: what the thread comes to launch
        self._asked: dict[str, threading.Event] = {}
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._channels: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        """They end after what they compile now."""
        for channel in self._channels:
            with suppress(OSError):  # it has ended
                # Closing is not enough: a process that was forked meanwhile has the channel, too.
                channel.shutdown(socket.SHUT_RDWR)
            channel.close()
        if self._process is None:
            return
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def before_compiling(self, **event: Any) -> bool:
        """Triton's hook: False, which lets it look into its cache and compile what is not there."""
        kernel = event["fn"]
        what = event["compile"]["specialization_data"]
        self._launched.kernel = kernel.module, kernel.name, what
        return False

    def compile_missing(self) -> None:
        """Have a process compile what this thread comes to launch; it may fail to.

        The very first kernel is compiled here: the processes are not ready yet.
        """
        kernel = self._launched.__dict__.pop("kernel", None)
        if kernel is None:  # the hook has not seen it
            return
        what = kernel[2]
        with self._lock:
            first, done = not self._asked, self._asked.get(what)
            own = done is None
            if done is None:
                done = self._asked[what] = threading.Event()
            if first and not self._started:
                self.start()
        if not own:  # another thread wants the same
            done.wait(_PATIENCE_SECONDS)
            return
        try:
            if not first:
                self._ask(*kernel)
        finally:
            done.set()

    def start(self) -> None:
        """To be called once."""
        self._started = True
        major, minor = torch.cuda.get_device_capability(self._device)
        try:
            self._process, self._channels = _start_processes(self._count, 10 * major + minor)
        except OSError as error:  # no more processes, or descriptors
            log.warning("kernels are compiled in threads alone, which takes longer: %s", error)
        for channel in self._channels:
            channel.settimeout(_PATIENCE_SECONDS)
            self._free.put(channel)

    def _ask(self, module: str, name: str, what: str) -> None:
        """Have it compiled, if a process is free; one that fails to answer is not asked again."""
        with suppress(queue.Empty, OSError):
            channel = self._free.get_nowait()
            channel.sendall(json.dumps([module, name, what]).encode() + b"\n")
            if channel.recv(1):
                self._free.put(channel)


def _start_processes(
    count: int, architecture: int
) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """The process that starts all others and waits for them, and the channels to these.

    Args:
        architecture: that they compile for, 90 for compute capability 9.0.
    """
    with ExitStack() as theirs, ExitStack() as unless_started:
        pairs = []
        for _ in range(count):
            pairs.append(socket.socketpair())
            unless_started.enter_context(pairs[-1][0])
            theirs.enter_context(pairs[-1][1])
        descriptors = [other.fileno() for _, other in pairs]
        numbers = map(str, (architecture, *descriptors))
        process = subprocess.Popen(
            [sys.executable, "-m", "radixgrove.kernels.compilers", *numbers],
            pass_fds=descriptors,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that all can be ended at once; a terminal's SIGINT is ours
        )
        unless_started.pop_all()
    return process, [own for own, _ in pairs]


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
    architecture, *descriptors = map(int, arguments)
    os.nice(_NICE)
    _prepare(architecture)
    channels = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for own in channels:
        try:
            child = os.fork()
        except OSError:  # fewer will do: the channels of the others are closed below
            break
        if not child:
            _serve_and_exit(own, channels)
    for channel in channels:
        channel.close()  # its process alone keeps it: the other side sees when that ends
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # torch would take a while to end


def _prepare(architecture: int) -> None:
    """Do what each process needs before there are many of them."""
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    compile_only = CompileOnly(architecture)
    driver.set_active(compile_only)
    import_module("radixgrove.kernels.ops")  # with nearly all kernels
    # Both are kept, for the names of kernels in the cache: they read Triton and run its assembler.
    triton_key()
    make_backend(compile_only.get_current_target()).hash()


def _serve_and_exit(own: socket.socket, channels: list[socket.socket]) -> None:
    try:
        for channel in channels:
            if channel is not own:
                channel.close()
        with suppress(OSError):  # the process that asks has ended
            _serve(own)
    finally:
        os._exit(0)


def _serve(channel: socket.socket) -> None:
    for line in channel.makefile("rb"):
        with suppress(Exception):  # it fails again where it was asked for, and is seen there
            preload(*json.loads(line))
        channel.sendall(b"\n")


def preload(module: str, name: str, what: str) -> None:
    """Compile the kernel of that name for what Triton's hook was given."""
    getattr(import_module(module), name).preload(what)


if __name__ == "__main__":
    main(sys.argv[1:])
