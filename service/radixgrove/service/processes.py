"""What a process gets from the system, and gives back: an end with the one that started it,
descriptors, memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # mallopt(3)
_LARGE = 1 << 20  # bytes
_ARENAS = 2  # each keeps what its threads freed; by default there are eight a core

# Loaded before any fork: between fork and exec a child must not take the import lock.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn` after which the kernel kills the child as soon as `parent` is gone.

    The kernel ties the child to the thread that forks it: start it from the main thread.
    """

    def set_up() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return set_up


def on_end(callback: Callable[[], None]) -> None:
    """Lets the running event loop call back when this process is to end.

    A terminal that closes asks for it by SIGHUP; not of a process that was started to outlive it
    (`nohup`), which has that signal ignored.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, callback)


def take_descriptors() -> None:
    """Opens as many files as the system allows this process, and those that it starts.

    A request through a router takes two; the usual soft limit, made for `select`, is 1,024.
    """
    open_standard_streams()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a sandbox may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_standard_streams() -> None:
    """Opens those of this process that are closed on nothing.

    The next connection would get the number that log lines go to, and Python has no object for a
    stream that was closed when it started.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def give_large_blocks_back() -> None:
    """Makes the C library return the memory of a large body, or of what it becomes, when it is
    freed, and not keep it in a heap.

    Once a block of some megabytes was freed, glibc takes the next ones of that size from its heap.
    That gives memory back only where nothing behind it lives on. Other libraries have no such
    setting.
    """
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)
