"""Starting a router: one process, or several that share one port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import uvloop

from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.replicas import static_address
from radixgrove.service import exit_codes, logs
from radixgrove.service.directories import private_directory
from radixgrove.service.listening import reserve
from radixgrove.service.liveness import tick
from radixgrove.service.processes import give_large_blocks_back, on_end, take_descriptors
from radixgrove.service.settings_check import check_settings
from radixgrove.service.supervisor import Supervised

logger = logging.getLogger(__name__)

SETTINGS_FILE = "router.json"
KILL_SECONDS = 5.0  # beyond `drain_timeout`


class RouterStartError(exit_codes.CodedStartFailed):
    """`replicas` has an entry that is no usable address; the text says what to change."""

    code = exit_codes.USAGE


def run(settings: RouterSettings) -> int:
    """Runs the router until a signal ends it; returns the exit code."""
    take_descriptors()
    if settings.processes == 1:
        return run_process(settings, 0, None)
    logs.configure(settings.log_level.value, json=settings.log_json)
    try:
        check(settings)
        with private_directory("radixgrove-router-") as directory:
            asyncio.run(_supervise(settings, directory))
    except StartFailed as error:
        logger.error("%s", error)
        return exit_codes.of(error)
    return 0


def run_process(settings: RouterSettings, index: int, shared: Path | None) -> int:
    """Runs one router process; `shared` is the directory of those that share the port."""
    # Here, not above: prometheus_client decides at import whether it is in multiprocess mode.
    from radixgrove.service.metric_files import reserve_room

    reserve_room()
    from radixgrove.router.server import RouterProcess

    logs.configure(settings.log_level.value, json=settings.log_json)
    logs.count_drops()
    give_large_blocks_back()

    async def serve() -> None:
        await RouterProcess(settings, index, shared).run()

    try:
        check(settings)
        uvloop.run(serve())
    except StartFailed as error:
        logger.error("%s", error)
        return exit_codes.of(error)
    return 0


def check(settings: RouterSettings) -> None:
    """What can be known to be wrong before any process starts.

    Raises:
        RouterStartError: `replicas` has no addresses. As `check_settings`, too.
    """
    check_settings(settings)
    if any("@" in replica for replica in settings.replicas):
        raise RouterStartError(
            "a URL in `replicas` has credentials; replicas get those of the client"
        )
    for replica in settings.replicas:
        try:
            static_address(replica)
        except ValueError as error:
            raise RouterStartError(f"`replicas`: {error}") from error


def load_settings(path: Path) -> RouterSettings:
    return RouterSettings.model_validate(json.loads(path.read_bytes()))


def _write_settings(settings: RouterSettings, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(settings.in_clear(), file)


async def _supervise(settings: RouterSettings, directory: Path) -> None:
    """Keeps `processes` children alive until a signal.

    Raises:
        ChildFailed: one ended before it served.
        BindingError: the port is taken or the address not ours.
    """
    stop = asyncio.Event()
    on_end(stop.set)
    # Port 0 becomes one port for all.
    reserved = reserve(settings.host, settings.port)
    settings = settings.model_copy(update={"port": reserved.getsockname()[1]})
    _write_settings(settings, directory / SETTINGS_FILE)
    (directory / "metrics").mkdir()
    services = [_child(directory, index) for index in range(settings.processes)]
    own = [asyncio.create_task(stop.wait()), asyncio.create_task(tick())]
    try:
        for service in services:
            await service.start()
        ends = [*own, *(service.failed for service in services)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for service in services:
            if service.failed.done():
                service.failed.result()
    finally:
        patience = settings.drain_timeout + KILL_SECONDS
        await asyncio.gather(*(service.stop(patience) for service in services))
        for task in own:
            task.cancel()
        reserved.close()


def _child(directory: Path, index: int) -> Supervised:
    return Supervised(
        f"router process {index}",
        (sys.executable, "-m", "radixgrove.router", str(directory), str(index)),
        {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory / "metrics")},
        announce=logger.error,
        ready_when_ticking=True,
    )
