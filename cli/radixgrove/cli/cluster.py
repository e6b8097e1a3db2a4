"""The local cluster of `radixgrove up`: Redis, a router and workers, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from click import ClickException
from pydantic import SecretStr

from radixgrove.cli.client import fetch
from radixgrove.cli.configuration import PREFIX
from radixgrove.cli.redis_server import (
    HOW_TO_GET,
    EmbeddedRedis,
    find_binary,
    free_ports,
    write_private,
)
from radixgrove.cli.resolving import UpParts
from radixgrove.protocol.keys import router_key
from radixgrove.protocol.settings import (
    Device,
    RouterSettings,
    Transport,
    WorkerSettings,
    reveal,
)
from radixgrove.protocol.words import counted
from radixgrove.service import exit_codes, machine
from radixgrove.service.children import Sink
from radixgrove.service.listening import API, MANAGEMENT, bound_socket, code_of
from radixgrove.service.probing import is_ready, local_address
from radixgrove.service.processes import on_end
from radixgrove.service.supervisor import ChildFailed, Supervised

_REDIS_START = 10.0
_POLL = 0.1
_GRACE = 10.0  # beyond a part's own drain timeout
_ID = re.compile(r"[0-9a-f]{8}")


class ClusterError(exit_codes.CodedStartFailed):
    """The cluster cannot start; the text says what to change."""


def plan_gpus(replicas: int, ranks: int, visible: list[str]) -> list[list[str]]:
    """Which GPUs each replica gets: one for each of its ranks, none shared.

    Raises:
        ClusterError: there are too few.
    """
    offered = len(visible)
    if replicas * ranks > offered:
        if offered >= ranks:
            remedy = f"--replicas {offered // ranks}"
        else:
            fewer = f"tp * pp * dp of at most {offered}"
            remedy = fewer if offered else "a machine with GPUs"
        raise ClusterError(
            f"{counted(replicas, 'replica')} of {counted(ranks, 'GPU')} each: {replicas * ranks} "
            f"in all; this machine offers {offered or 'none'}: try {remedy}, or --device cpu"
        )
    return [visible[index * ranks : (index + 1) * ranks] for index in range(replicas)]


def visible_gpus() -> list[str]:
    """Indices of the GPUs that we may use, asked of nvidia-smi rather than of torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [item.strip() for item in chosen.split(",") if item.strip()]
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return []
    result = subprocess.run(
        [binary, "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.stdout.split() if result.returncode == 0 else []


class Cluster:
    """Owns every process of the cluster from `start` to `stop`."""

    def __init__(
        self,
        parts: UpParts,
        directory: Path,
        state: Path,
        sink_of: Callable[[str], Sink],
        announce: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: private, of this run alone.
            state: directory that the next run finds again.
        """
        self.announce = announce
        self._start_timeout = parts.up.settings.start_timeout
        self._directory = directory
        self._sink_of = sink_of
        self._redis: EmbeddedRedis | None = None
        router = parts.router.settings
        # All at once: none of the parts holds its port until it runs.
        ports = iter(
            free_ports(
                2 + 2 * parts.up.settings.replicas, taken={router.port, router.management_port}
            )
        )
        redis_url = parts.worker.settings.redis_url or parts.router.settings.redis_url
        if redis_url is None:
            self._redis = self._embedded_redis(next(ports))
            redis_url = self._redis.url
        shared: dict[str, object] = {
            "redis_url": redis_url,
            "internal_key": _secret(parts, "internal_key"),
            "cluster_secret": _secret(parts, "cluster_secret"),
        }
        if self._redis is None:
            shared |= _own_prefix(parts, state)
        # On one's own machine one may know where a request went.
        reveal_replica = (
            parts.router.settings.reveal_replica
            or parts.router.sources["reveal_replica"] == "default"
        )
        own = {
            "reveal_replica": reveal_replica,
            "management_port": router.management_port or next(ports),
        }
        self.router: RouterSettings = router.model_copy(update={**shared, **own})
        self.workers: list[WorkerSettings] = [
            self._worker_settings(parts, index, ports, shared)
            for index in range(parts.up.settings.replicas)
        ]
        self._services: list[Supervised] = []

    @property
    def endpoint(self) -> str:
        return f"http://{_in_url(local_address(self.router.host))}:{self.router.port}/v1"

    @property
    def management_url(self) -> str:
        host = local_address(self.router.management_host)
        return f"http://{_in_url(host)}:{self.router.management_port}"

    async def start(self) -> None:
        """Start all parts and wait until the whole answers.

        Raises:
            ClusterError: a part ended or did not become ready in time.
            UnusableSettings, BindingError: see `check_settings`.
        """
        from radixgrove.router.main import check
        from radixgrove.service.settings_check import check_settings

        check(self.router)
        check_settings(self.workers[0])
        _check_ports_free(self.router)
        gpus = self._gpus()
        if self._redis is not None:
            redis = await self._launch("redis", self._redis.command, {})
            await self._until(self._redis.answers, [redis], redis, _REDIS_START)
            redis.mark_ready()
        else:
            await _await_redis(self.router, _REDIS_START)
        workers = []
        for index, settings in enumerate(self.workers):
            extra = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index])} if gpus else {}
            name = settings.replica_id or ""
            workers.append(await self._launch(name, self._command("worker", name, settings), extra))
        command = self._command("router", "router", self.router)
        router = await self._launch("router", command, {})
        parts = [*workers, router]
        for settings, worker in zip(self.workers, workers, strict=True):
            address = (settings.management_host, settings.management_port)
            ready = functools.partial(is_ready, *address)
            await self._until(ready, parts, worker, self._start_timeout)
            self.announce(f"{worker.name} is ready")
        await self._until(self._endpoint_ready, parts, router, 60.0)
        self.announce("the router is ready")
        await self._until(self._routes_to_all, parts, router, 60.0, "'s list of replicas")
        for part in parts:
            part.mark_ready()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain from the outside in: router, workers, Redis; a second signal cuts it short."""
        hurried = asyncio.create_task(self._kill_when(hurry))
        workers = [s for s in self._services if s.name not in ("router", "redis")]
        for group, patience in [
            ([s for s in self._services if s.name == "router"], self.router.drain_timeout),
            (workers, max(settings.drain_timeout for settings in self.workers)),
            ([s for s in self._services if s.name == "redis"], 0.0),
        ]:
            await asyncio.gather(*(service.stop(patience + _GRACE) for service in group))
        hurried.cancel()

    async def _kill_when(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        for service in self._services:
            service.kill()

    # ---- parts ---------------------------------------------------------------------------------

    def _embedded_redis(self, port: int) -> EmbeddedRedis:
        binary = find_binary()
        if binary is None:
            raise ClusterError(f"no Redis: give --redis-url, or {HOW_TO_GET}")
        return EmbeddedRedis.prepare(binary, self._directory, port)

    def _worker_settings(
        self, parts: UpParts, index: int, ports: Iterator[int], shared: dict[str, object]
    ) -> WorkerSettings:
        settings = parts.worker.settings
        threads = settings.cpu_threads
        if threads is None:
            # Replicas share the cores; each taking all of them would slow every one down.
            threads = max(1, machine.cores() // parts.up.settings.replicas)
        own = {
            "replica_id": f"replica-{index}",
            "cpu_threads": threads,
            "port": next(ports),
            "management_port": next(ports),
        }
        return settings.model_copy(update={**shared, **own})

    def _gpus(self) -> list[list[str]]:
        settings = self.workers[0]
        if settings.device is Device.CPU:
            return []
        visible = visible_gpus()
        if not visible and settings.device is Device.AUTO:
            return []
        ranks = settings.tp * settings.pp * settings.dp
        if settings.transport is Transport.GLOO:  # ranks may share a GPU
            ranks = min(ranks, max(1, len(visible) // len(self.workers)))
        return plan_gpus(len(self.workers), ranks, visible)

    def _command(
        self, part: str, name: str, settings: WorkerSettings | RouterSettings
    ) -> list[str]:
        """Settings travel in a private file: secrets appear on no command line."""
        path = self._directory / f"{name}.yaml"
        write_private(path, json.dumps({part: settings.in_clear()}))
        return [sys.executable, "-m", "radixgrove.cli", part, "--config", str(path)]

    async def _launch(self, name: str, command: list[str], extra: dict[str, str]) -> Supervised:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        environ |= {"PYTHONUNBUFFERED": "1", **extra}
        service = Supervised(name, command, environ, self._sink_of(name), self.announce)
        self._services.append(service)
        await service.start()
        return service

    # ---- readiness -----------------------------------------------------------------------------

    async def _until(
        self,
        probe: Callable[[], bool],
        parts: list[Supervised],
        asked: Supervised,
        seconds: float,
        what: str = "",
    ) -> None:
        """
        Args:
            parts: waiting ends when one of them ends.
            asked: the part that the probe asks.
            what: of that part.

        Raises:
            ClusterError: one of the parts ended, or the probe was false for so long.
        """
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(probe):
            for part in parts:
                if part.failed.done():
                    try:
                        part.failed.result()
                    except ChildFailed as error:
                        raise ClusterError(str(error), _code(error)) from None
            if time.monotonic() > deadline:
                complaint = asked.child.last_complaint()
                raise ClusterError(
                    f"{asked.name}{what} was not ready after {seconds:.0f} s"
                    + (f": {complaint}" if complaint else "")
                )
            await asyncio.sleep(_POLL)

    def _endpoint_ready(self) -> bool:
        return is_ready(self.router.host, self.router.port)

    def _routes_to_all(self) -> bool:
        """Whether the router has heard of every replica."""
        key = reveal(self.router.management_key) or None
        try:
            status = fetch(self.management_url, "GET", "/status", key=key)
        except ClickException:
            return False
        ready = Counter(e["group"] for e in status["replicas"] if e["state"] == "ready")
        return all(ready[worker.replica_id] == worker.dp for worker in self.workers)


def _code(error: ChildFailed) -> int:
    """That of a part which says that its settings or its model are to blame."""
    passed_on = error.status in (exit_codes.USAGE, exit_codes.MODEL)
    return error.status if error.status is not None and passed_on else exit_codes.FAILED


async def _await_redis(settings: RouterSettings, seconds: float) -> None:
    """A Redis that is not ours, by the rule of the parts that are to use it.

    Raises:
        ClusterError: it cannot be used, at once or within that time.
    """
    from radixgrove.service.redis_link import RedisLink

    assert settings.redis_url is not None
    key = router_key(settings.redis_prefix, f"up-{secrets.token_hex(4)}")
    link = RedisLink(settings.redis_url, key, f"waiting for it for up to {seconds:.0f} s")
    connecting = asyncio.create_task(link.run())
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await link.wait_until_tried(seconds)
                if not link.unsuitable:
                    await link.wait_until_up(seconds)
        if not link.up:
            raise ClusterError(f"--redis-url: Redis cannot be used ({link.problem})")
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


def _secret(parts: UpParts, name: str) -> SecretStr:
    """One that worker and router share: as configured for either, else a new one."""
    return _given(parts, name) or SecretStr(secrets.token_urlsafe(32))


def _given(parts: UpParts, name: str) -> SecretStr | None:
    given = getattr(parts.worker.settings, name) or getattr(parts.router.settings, name)
    return given if isinstance(given, SecretStr) else None


def _own_prefix(parts: UpParts, state: Path) -> dict[str, str]:
    """Where neither a prefix nor a secret to share with others is configured, one of this state
    directory and port: another cluster in the same Redis has replicas of the same names, and what
    a run leaves there that did not end in order is the next one's.
    """
    sources = {part.sources["redis_prefix"] for part in (parts.router, parts.worker)}
    if sources != {"default"} or _given(parts, "cluster_secret"):
        return {}
    router = parts.router.settings
    return {"redis_prefix": f"{router.redis_prefix}-up-{router.port}-{_lasting_id(state)}"}


def _lasting_id(state: Path) -> str:
    """Drawn by the first run that keeps its state there."""
    path = state / "id"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = path.read_text()
        if _ID.fullmatch(known):
            return known
    path.unlink(missing_ok=True)
    drawn = secrets.token_hex(4)
    write_private(path, drawn)
    return drawn


def _check_ports_free(settings: RouterSettings) -> None:
    """The router's ports, before minutes of loading; clients could not know a port chosen by 0."""
    if settings.port == 0:
        raise ClusterError("`up` needs a port for its endpoint: --port 8000", exit_codes.USAGE)
    for listener, host, port in (
        (API, settings.host, settings.port),
        (MANAGEMENT, settings.management_host, settings.management_port),
    ):
        try:
            bound_socket(host, port).close()
        except OSError as error:
            another = f", e.g. {listener.port_flag} {free_ports(1)[0]}"
            text = listener.explain(error, host, port, another)
            raise ClusterError(text, code_of(error)) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Signals:
    """First signal: stop. Second: hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        on_end(self._on_signal)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
