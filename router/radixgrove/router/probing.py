"""Asking replicas themselves whether they serve: those that no lease speaks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from radixgrove.router.replicas import Replica

PROBE_SECONDS = 1.0
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MAX_MODELS = 64


class _Listing(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


class Prober:
    """Asks `targets()` over and over, side by side; calls `changed()` when an answer differs."""

    def __init__(
        self,
        session: Callable[[], aiohttp.ClientSession],
        targets: Callable[[], Sequence[Replica]],
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._targets = targets
        self._changed = changed

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            targets = self._targets()
            before = [(replica.ready, tuple(replica.models)) for replica in targets]
            await asyncio.gather(*(self._probe(replica) for replica in targets))
            if before != [(replica.ready, tuple(replica.models)) for replica in targets]:
                self._changed()
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self, replica: Replica) -> None:
        try:
            status = await self._status(replica.url + "/readyz")
            if status == 404:  # vLLM and SGLang
                status = await self._status(replica.url + "/health")
            if status == 200 and not replica.models:
                replica.models = await self._listed_models(replica)
            replica.ready = status == 200
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            replica.ready = False
        if replica.ready:
            replica.seen = time.monotonic()

    async def _status(self, url: str) -> int:
        async with self._session().get(url, timeout=PROBE_TIMEOUT) as response:
            await response.read()
            return response.status

    async def _listed_models(self, replica: Replica) -> list[str]:
        url = replica.url + "/v1/models"
        async with self._session().get(url, timeout=PROBE_TIMEOUT) as response:
            if response.status != 200:
                return []
            try:
                listing = msgspec.json.decode(await response.read(), type=_Listing)
            except msgspec.DecodeError:
                return []
            return [model.id for model in listing.data[:MAX_MODELS]]
