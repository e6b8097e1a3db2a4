"""The one supervisor: children that are watched, and started again when they end or hang."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from radixgrove.protocol.errors import StartFailed
from radixgrove.service.children import Child, Sink
from radixgrove.service.liveness import TICK_SECONDS

FIRST_BACKOFF = 1.0
LONGEST_BACKOFF = 30.0
# A child that lived this long has earned a fresh back-off.
SETTLED_SECONDS = 60.0
# A child answers no request any more once its event loop, having turned, stands for so long.
HANG_SECONDS = 10.0


class ChildFailed(StartFailed):
    """A child cannot be started; or it ended, or hung and was killed, and is not started again. The
    text says how."""

    def __init__(self, message: str, *, hung: bool, status: int | None = None) -> None:
        """
        Args:
            status: the child's, where it ended by itself.
        """
        super().__init__(message)
        self.hung = hung
        self.status = status


class Supervised:
    """One process that is kept alive from `start` to `stop`.

    Until it was ready once, its end is final (`failed`): starting it again would not help. From
    then on it is started again after a pause, which doubles from one early end to the next. A child
    that calls `liveness.tick` is killed when its event loop stands still.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        sink: Sink | None = None,
        announce: Callable[[str], None] = lambda text: None,
        *,
        restart: bool = True,
        ready_when_ticking: bool = False,
    ) -> None:
        """
        Args:
            sink: gets the child's output; None: it writes where this process does.
            announce: gets a line for people about each end that leads to a restart.
            restart: whether to start it again at all; without, every end is final.
            ready_when_ticking: its first tick makes it ready, else `mark_ready` does.
        """
        self.name = name
        self.restarts = 0
        self._child: Child | None = None
        self._command = command
        self._environ = environ
        self._sink = sink
        self._announce = announce
        self._restart = restart
        self._ready_when_ticking = ready_when_ticking
        self._ready = False
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Must run on the main thread, as `Child.start`.

        Raises:
            ChildFailed: the system does not start it.
        """
        self._child = await self._start_child()
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of {self.name}")

    @property
    def child(self) -> Child:
        """The running process, or the one that ended last."""
        assert self._child is not None
        return self._child

    def mark_ready(self) -> None:
        self._ready = True

    @property
    def failed(self) -> asyncio.Task[None]:
        """Done only when the child is given up, or was stopped; a failure raises ChildFailed."""
        assert self._keeper is not None
        return self._keeper

    async def stop(self, patience: float) -> None:
        """End the child, in order and within `patience` seconds, and stop keeping it alive."""
        self._stopping = True
        if self._child is not None and self._child.running:
            await self._child.stop(patience)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        # The keeper may have been in the middle of a restart.
        if self._child is not None and self._child.running:
            await self._child.stop(patience)

    def kill(self) -> None:
        """End the child at once; `stop` still has to be awaited."""
        self._stopping = True
        if self._child is not None and self._child.running:
            self._child.process.kill()

    async def _start_child(self) -> Child:
        """Raises ChildFailed where there is no process, memory or descriptor left, or no right."""
        try:
            return await Child.start(self.name, self._command, self._environ, self._sink)
        except (OSError, subprocess.SubprocessError) as error:
            raise ChildFailed(f"{self.name} cannot be started: {error}", hung=False) from error

    async def _keep(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            started = time.monotonic()
            hung = await self._watch(self.child)
            if self._stopping:
                return
            obituary = hung or self.child.obituary()
            if not (self._restart and self._ready):
                status = None if hung else self.child.process.returncode
                raise ChildFailed(obituary, hung=hung is not None, status=status)
            if time.monotonic() - started > SETTLED_SECONDS:
                backoff = FIRST_BACKOFF
            backoff = await self._start_again(obituary, backoff)

    async def _start_again(self, reason: str, backoff: float) -> float:
        """Tries until there is a new child: what a machine lacks may come back.

        Returns:
            The pause after which the next one is to be started, seconds.
        """
        while True:
            self._announce(f"{reason}; starting it again in {backoff:.0f} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF)
            self.restarts += 1
            try:
                self._child = await self._start_child()
            except ChildFailed as error:
                reason = str(error)
            else:
                return backoff

    async def _watch(self, child: Child) -> str | None:
        """Returns once the child has ended: why it was killed, if it was for hanging."""
        hung = None
        while not child.exited.done():
            await asyncio.wait([child.exited], timeout=TICK_SECONDS / 2)
            silence = child.silence()
            if self._ready_when_ticking and silence is not None:
                self._ready = True
            if silence is not None and silence > HANG_SECONDS and not self._stopping:
                hung = (
                    f"{child.name} (process {child.pid}) hangs: its event loop has not turned for "
                    f"{silence:.0f} s; killed it"
                )
                await child.kill()
        return hung
