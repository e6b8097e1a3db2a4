"""Asking replicas themselves whether they serve: those that no lease speaks for, or in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from radixgrove.protocol.foreign import decode_json
from radixgrove.router.http_client import is_ours
from radixgrove.router.replicas import Replica

PROBE_SECONDS = 1.0
PAUSE_SECONDS = 0.05  # at least, however many replicas come into doubt
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MAX_MODELS = 64

MAX_BYTES = 1 << 20  # of an answer: more is none


class _Listing(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


@dataclass(slots=True)
class Probe:
    """One question, and what came of it."""

    sent: float  # monotonic
    answered: bool = False
    serves: bool = False
    models: list[str] = field(default_factory=list)  # where they were not known before


class Prober:
    """Asks `targets()` over and over, each by itself: one that hangs delays no other.

    `noticed` is called with what each probe found.
    """

    def __init__(
        self,
        session: Callable[[], aiohttp.ClientSession],
        targets: Callable[[], Iterable[Replica]],
        noticed: Callable[[Replica, Probe], None],
    ) -> None:
        self._session = session
        self._targets = targets
        self._noticed = noticed
        self._wake = asyncio.Event()

    def hurry(self) -> None:
        """A replica has come into doubt: it is asked now."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        asked: set[Replica] = set()  # that have not answered yet

        async def ask(replica: Replica) -> None:
            try:
                await self._probe(replica)
            finally:
                asked.discard(replica)

        async with asyncio.TaskGroup() as probes:
            while True:
                now = time.monotonic()
                for replica in self._targets():
                    due = now - replica.probed >= PROBE_SECONDS or replica.probed < replica.doubted
                    if due and replica not in asked:
                        asked.add(replica)
                        probes.create_task(ask(replica))
                await asyncio.sleep(PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_SECONDS - PAUSE_SECONDS):
                        await self._wake.wait()
                self._wake.clear()

    async def _probe(self, replica: Replica) -> None:
        probe = Probe(sent=time.monotonic())
        replica.probed = probe.sent
        try:
            status, _ = await self._get(replica.url + "/readyz")
            if status == 404:  # vLLM and SGLang
                status, _ = await self._get(replica.url + "/health")
            probe.answered, probe.serves = True, status == 200
            if probe.serves and not replica.models:
                probe.models = await self._listed_models(replica)
        except Exception as error:  # whatever it sends: the other replicas are asked on
            if is_ours(error):
                return  # which says nothing of the replica
            probe.serves = False
        self._noticed(replica, probe)

    async def _get(self, url: str) -> tuple[int, bytes]:
        """Status and body. Raises ValueError: it has more than `MAX_BYTES`."""
        request = self._session().get(url, timeout=PROBE_TIMEOUT, allow_redirects=False)
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise ValueError("an endless answer")
            return response.status, bytes(body)

    async def _listed_models(self, replica: Replica) -> list[str]:
        status, body = await self._get(replica.url + "/v1/models")
        if status != 200:
            return []
        try:
            listing = decode_json(body, _Listing)
        except ValueError:
            return []
        return [model.id for model in listing.data[:MAX_MODELS]]
