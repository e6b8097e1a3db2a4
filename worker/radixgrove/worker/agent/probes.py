"""The API port of a machine that answers no requests: its probes, as every worker has them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from fastapi import Response

from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import asgi
from radixgrove.service.api import Api, Health, reply
from radixgrove.service.listening import listen
from radixgrove.service.server import Server

_MAX_BODY_BYTES = 1024


@contextlib.asynccontextmanager
async def serving(settings: WorkerSettings, role: Callable[[], str]) -> AsyncIterator[None]:
    """Serve `/livez` and `/readyz` while the block runs.

    Args:
        role: what `/readyz` says; empty while the machine is not ready.

    Raises:
        BindingError: the port is taken.
    """
    listener = listen(settings.host, settings.port)
    async with Server(_app(role), listener).running("API port"):
        yield


def _app(role: Callable[[], str]) -> asgi.App:
    api = Api("Radixgrove worker: a machine of a group", needs_key=False)

    @api.probe("/livez", "/health")
    def livez() -> str:
        """Whether the process answers."""
        return ""

    @api.read("/readyz", Health)
    async def readyz() -> Response:
        """Whether this machine's ranks are part of their group."""
        if said := role():
            return reply(Health(said))
        raise ApiError(503, "The ranks of this machine have not joined.", type="server_error")

    return asgi.build(api, max_body_bytes=_MAX_BODY_BYTES)


class Marker:
    """A file that outlives a container but not its pod: its machine has joined a group before."""

    def __init__(self, settings: WorkerSettings, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("GROUP_MARKER")
        self._path = Path(path) if path and settings.nodes > 1 else None

    @property
    def is_set(self) -> bool:
        """The group of the machine has lost it, and is replaced as a whole."""
        return self._path is not None and self._path.exists()

    def set(self) -> None:
        if self._path is not None:
            self._path.touch()
