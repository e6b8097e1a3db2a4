"""Processes that never outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)

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
