"""How much text is encoded at once, over all models of a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from radixgrove.protocol.errors import Interrupted

MAX_CHARACTERS = 2 << 20  # a tokenizer takes some 150 bytes a character while it works
_THREADS = 4
T = TypeVar("T")


class Abandoned(Interrupted):
    """The request that needed the work has ended."""


class EncodingBudget:
    """Runs work on threads, so much at once that its texts stay within a number of characters.

    Work waits in its order; a text longer than the whole budget has it alone. What is cancelled
    while it waits never begins, and what runs ends where it next calls `check`. For one event loop.
    """

    def __init__(self, characters: int = MAX_CHARACTERS) -> None:
        self._free = self._most = characters
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, "encode")

    async def run(self, characters: int, work: Callable[[Callable[[], None]], T]) -> T:
        """What `work(check)` returns, made on a thread.

        Args:
            work: calls `check` now and then, which raises `Abandoned` once this call is cancelled.
        """
        size = min(characters, self._most)
        await self._take(size)
        abandoned = False

        def check() -> None:
            if abandoned:
                raise Abandoned

        loop = asyncio.get_running_loop()

        def give_back(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._give, size)

        job = self._threads.submit(work, check)
        job.add_done_callback(give_back)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            abandoned = True
            raise

    async def _take(self, size: int) -> None:
        if not self._waiting and self._free >= size:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = size, turn
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._give(0)  # it may have been what the others waited behind
            else:
                self._give(size)
            raise

    def _give(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            self._free -= size
            if not turn.done():
                turn.set_result(None)
            else:
                self._free += size
