"""What drills of ranks share: clients that ask without a pause, and processes that must end."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.drills.load import Answer, End

GIVEN_UP = 60.0  # seconds after a fault
SETTLED = 2.0  # seconds of load before a fault
UNREACHABLE = "unreachable"  # no connection was accepted


@dataclass
class Clients:
    """Each has one request at a time.

    Attributes:
        ask: makes one request and says how it ended; OSError: no connection was accepted.
        ends: of requests, counted.
    """

    ask: Callable[[random.Random], str]
    ends: Counter[str] = field(default_factory=Counter)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self, count: int) -> Iterator[None]:
        """So many of them meanwhile."""
        threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            try:
                end = self.ask(rng)
            except OSError:
                end = UNREACHABLE
            self.ends[end] += 1
            if end != End.WHOLE.value:
                self._over.wait(0.1)


def complete(address: str, port: int, body: dict[str, Any], timeout: float) -> Answer:
    """The answer to a text completion.

    Raises:
        OSError: no connection is accepted.
    """
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.connect()
        return _exchange(connection, json.dumps(body))
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, body: str) -> Answer:
    answer = Answer()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        while part := response.read1():
            answer.raw += part
        if response.length:  # of a body with a length, the end of which `read1` takes for its own
            answer.broken = f"{response.length} bytes are missing"
    except (OSError, http.client.HTTPException) as error:
        answer.broken = repr(error)
    return answer


def family_of(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """They and all below them."""
    return [*processes, *(child for one in processes for child in one.children(recursive=True))]


def seconds_until_gone(family: Sequence[psutil.Process], began: float) -> float:
    """From `began`, of the monotonic clock, until none of them runs, or `GIVEN_UP`."""
    while time.monotonic() - began < GIVEN_UP and any(map(runs, family)):
        time.sleep(0.05)
    return time.monotonic() - began


def runs(process: psutil.Process) -> bool:
    """A frozen one that was killed is a zombie until its agent has looked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
