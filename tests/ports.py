"""Ports for what tests start: two that ask beside each other never get the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

# Below those that `radixgrove up` gives its parts, and below the range from which the kernel takes
# ports of clients and for port 0: no program gets one by chance before it is used.
_FIRST, _END = 10_000, 20_000

# Of this process of tests, among those that run beside each other.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _own_ports() -> list[int]:
    """Those of this process among the processes of tests, in an order of their own each time."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(_FIRST + PROCESS, _END, count))
    random.SystemRandom().shuffle(ports)  # Hypothesis seeds the ordinary generator
    return ports


_PORTS = _own_ports()
_NEXT = itertools.cycle(_PORTS)


def find_free_port(address: str = "127.0.0.1") -> int:
    """A port of `address` that was free a moment ago, and was not given out for a long time."""
    for port in itertools.islice(_NEXT, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise RuntimeError(f"no free port on {address}")
