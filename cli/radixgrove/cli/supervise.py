"""Children that are started again whenever they end by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from radixgrove.service.children import Child, Sink, describe_exit

FIRST_BACKOFF = 1.0
LONGEST_BACKOFF = 30.0
# A child that lived this long has earned a fresh back-off.
SETTLED_SECONDS = 60.0


class ChildFailed(Exception):
    """A child ended before it was ever ready: starting it again would not help."""


class Supervised:
    """One service of a local cluster. `start`, then `stop`; in between it is kept alive."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        sink: Sink,
        announce: Callable[[str], None],
    ) -> None:
        self.name = name
        self.restarts = 0
        self.child: Child | None = None
        self._command = command
        self._environ = environ
        self._sink = sink
        self._announce = announce
        self._settled = False  # was ready once: from then on deaths lead to restarts
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.child = await Child.start(self.name, self._command, self._environ, self._sink)
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of {self.name}")

    def mark_ready(self) -> None:
        self._settled = True

    @property
    def failed(self) -> asyncio.Task[None]:
        """Done only when the child is given up; its result raises ChildFailed."""
        assert self._keeper is not None
        return self._keeper

    async def stop(self, patience: float) -> None:
        """End the child, in order, and stop keeping it alive."""
        self._stopping = True
        if self.child is not None and self.child.running:
            await self.child.stop(patience)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        # The keeper may have been in the middle of a restart.
        if self.child is not None and self.child.running:
            await self.child.stop(patience)

    def kill(self) -> None:
        """End the child at once; `stop` still has to be awaited."""
        self._stopping = True
        if self.child is not None and self.child.running:
            self.child.process.kill()

    async def _keep(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            assert self.child is not None
            started = time.monotonic()
            code = await asyncio.shield(self.child.exited)
            if self._stopping:
                return
            obituary = f"{self.name} (process {self.child.pid}) {describe_exit(code)}"
            if not self._settled:
                error = self.child.last_error()
                raise ChildFailed(f"{obituary}: {error}" if error else obituary)
            if time.monotonic() - started > SETTLED_SECONDS:
                backoff = FIRST_BACKOFF
            self._announce(f"{obituary}; starting it again in {backoff:.0f} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF)
            self.restarts += 1
            self.child = await Child.start(self.name, self._command, self._environ, self._sink)
