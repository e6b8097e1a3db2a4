"""Starting a router: one process, or several that share one port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from radixgrove.protocol.settings import RouterSettings
from radixgrove.service import logs
from radixgrove.service.auth import ApiKeys, KeyFileError
from radixgrove.service.directories import private_directory
from radixgrove.service.listening import BindingError, check_management, listen
from radixgrove.service.processes import die_with
from radixgrove.service.redis_rules import RedisAddress

logger = logging.getLogger(__name__)

SETTINGS_FILE = "router.json"
EXIT_FAILED = 1
MAX_RESTART_SECONDS = 10.0
STEADY_SECONDS = 30.0  # a child that ran this long is restarted without a pause
KILL_SECONDS = 5.0  # beyond `drain_timeout`


class StartError(Exception):
    """The router cannot start; the text says what to change."""


def run(settings: RouterSettings) -> int:
    """Runs the router until SIGTERM or SIGINT; returns the exit code."""
    if settings.processes == 1:
        return run_process(settings, 0, None)
    logs.configure(settings.log_level.value, json=settings.log_json)
    try:
        check(settings)
        with private_directory("radixgrove-router-") as directory:
            uvloop.run(_supervise(settings, directory))
    except (StartError, BindingError) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    return 0


def run_process(settings: RouterSettings, index: int, shared: Path | None) -> int:
    """Runs one router process; `shared` is the directory of those that share the port."""
    # Here, not above: prometheus_client decides at import whether it is in multiprocess mode.
    from radixgrove.router.server import RouterProcess, TaskEnded

    logs.configure(settings.log_level.value, json=settings.log_json)

    async def serve() -> None:
        await RouterProcess(settings, index, shared).run()

    try:
        check(settings)
        uvloop.run(serve())
    except (StartError, BindingError, TaskEnded) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    return 0


def check(settings: RouterSettings) -> None:
    """What can be known to be wrong before any process starts.

    Raises:
        StartError, BindingError: the text says what to change.
    """
    check_management(settings)
    try:
        ApiKeys.load(settings.api_keys_file)
    except KeyFileError as error:
        raise StartError(str(error)) from error
    if any("@" in replica for replica in settings.replicas):
        raise StartError("a URL in `replicas` has credentials; replicas get those of the client")
    try:
        RedisAddress(settings.redis_url or "redis://")
    except ValueError as error:
        raise StartError(f"redis_url is {error}") from error


def load_settings(path: Path) -> RouterSettings:
    return RouterSettings.model_validate(json.loads(path.read_bytes()))


def _write_settings(settings: RouterSettings, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(settings.in_clear(), file)


async def _supervise(settings: RouterSettings, directory: Path) -> None:
    """Keeps `processes` children alive; a dead one is reported and replaced with back-off."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Held open, never listening: port 0 becomes one port for all, and nobody else gets it.
    reserved = listen(settings.host, settings.port, shared=True)
    settings = settings.model_copy(update={"port": reserved.getsockname()[1]})
    _write_settings(settings, directory / SETTINGS_FILE)
    (directory / "metrics").mkdir()
    children = [
        asyncio.create_task(_keep_alive(settings, directory, index, stop))
        for index in range(settings.processes)
    ]
    await asyncio.gather(*children)
    reserved.close()


async def _keep_alive(
    settings: RouterSettings, directory: Path, index: int, stop: asyncio.Event
) -> None:
    loop = asyncio.get_running_loop()
    pause = 0.0
    while not stop.is_set():
        began = loop.time()
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory / "metrics")}
        command = (sys.executable, "-m", "radixgrove.router", str(directory), str(index))
        child = await asyncio.create_subprocess_exec(
            *command, env=environment, preexec_fn=die_with(os.getpid())
        )
        exited, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
        await asyncio.wait([exited, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not exited.done():
            child.terminate()
            try:
                async with asyncio.timeout(settings.drain_timeout + KILL_SECONDS):
                    await asyncio.shield(exited)
            except TimeoutError:
                child.kill()
        code = await exited
        if stop.is_set():
            return
        steady = loop.time() - began > STEADY_SECONDS
        pause = 0.0 if steady else min(max(0.5, pause * 2), MAX_RESTART_SECONDS)
        logger.error(
            "router process %d ended with status %d; restarting in %.1f s", index, code, pause
        )
        try:
            async with asyncio.timeout(pause):
                await stop.wait()
        except TimeoutError:
            continue
