"""`radixgrove up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from radixgrove.cli.cluster import Cluster, Signals
from radixgrove.cli.demonstration import QUESTION, demonstrate
from radixgrove.cli.options import SettingsCommand, setting_options
from radixgrove.cli.part_logs import PartLogs, default_directory, show
from radixgrove.cli.parts import AMBIGUOUS
from radixgrove.cli.resolving import UpParts
from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.words import counted
from radixgrove.service import exit_codes, logs
from radixgrove.service.directories import private_directory


def _up(
    config: str | None, show_requests: bool, follow: bool, log_dir: Path | None, **flags: Any
) -> int:
    parts = UpParts(config, flags)
    directory = log_dir or default_directory(parts.router.settings.port)
    # Someone who chooses a level wants to see the lines.
    chosen = [part.sources["log_level"] for part in (parts.router, parts.worker)]
    try:
        part_logs = PartLogs(directory, follow=follow or chosen != ["default", "default"])
    except OSError as error:
        text = f"no logs can be written to {directory} ({error.strerror}): choose --log-dir"
        raise click.ClickException(text) from None
    with contextlib.closing(part_logs):
        try:
            with private_directory("radixgrove-up-") as private:
                return asyncio.run(_run(parts, private, part_logs, show_requests))
        except StartFailed as error:
            logs.STDERR.flush()  # the reason comes last
            click.ClickException(f"{error}\nLogs: {directory}").show()
            return exit_codes.of(error)


async def _run(parts: UpParts, directory: Path, part_logs: PartLogs, show_requests: bool) -> int:
    signals = Signals()
    started = time.monotonic()
    cluster = Cluster(parts, directory, part_logs.directory, part_logs.sink, _announce)
    _announce(f"starting {counted(len(cluster.workers), 'replica')} and a router")
    _announce(f"their logs, requests included: {part_logs.directory}/*.log")
    starting = asyncio.create_task(cluster.start())
    stopped = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce_ready(cluster, part_logs.directory, time.monotonic() - started)
            if show_requests:
                await _demonstrate(cluster, signals)
            await stopped
        _announce("draining; once more ends at once")
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopped.cancel()
        await cluster.stop(signals.hurry)
    _announce("ended")
    return exit_codes.OK


def _announce(text: str) -> None:
    show("up", text)


def _announce_ready(cluster: Cluster, log_directory: Path, seconds: float) -> None:
    """The end of the start: where it is, what it serves, and a command to paste."""
    worker = cluster.workers[0]
    model = _model_id(worker.served_model_name, worker.model)
    body = json.dumps(
        {
            "model": model,
            "temperature": 0,
            "max_tokens": 100,
            "messages": [{"role": "user", "content": QUESTION}],
        }
    )
    key = " -H 'authorization: Bearer YOUR_KEY'" if cluster.router.api_keys_file else ""
    other = "" if cluster.router.port == 8000 else f" --url {cluster.endpoint.removesuffix('/v1')}"
    default = cluster.router.management_port == 8001
    other_manage = "" if default else f" --management-url {cluster.management_url}"
    _say(
        f"\nradixgrove is ready after {seconds:.1f} s\n"
        f"  endpoint   {cluster.endpoint}\n"
        f"  model      {model}\n"
        f"  replicas   {', '.join(w.replica_id or '' for w in cluster.workers)}\n"
        f"  try        curl {cluster.endpoint}/chat/completions -H 'content-type: application/json'"
        f"{key} \\\n               -d '{body}'\n"
        f"  more       {_command()} chat{other}\n"
        f"             {_command()} ps{other_manage}\n"
        f"  logs       {log_directory}/*.log\n"
        "  end        Ctrl-C drains and leaves nothing behind\n"
    )


def _say(text: str) -> None:
    """On standard output. A reader that has ended, or a full disk, does not end the cluster."""
    try:
        click.echo(text)
    except OSError:
        # What is left in the buffer would be an error again at the end.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _command() -> str:
    """How this very command is called again: by its path where the shell would not find it."""
    called = Path(sys.argv[0])
    found = shutil.which("radixgrove")
    if called.name != "radixgrove" or (found and Path(found).resolve() == called.resolve()):
        return "radixgrove"
    return shlex.quote(str(called))


async def _demonstrate(cluster: Cluster, signals: Signals) -> None:
    """Three requests, unless the user has enough before their end."""
    url = cluster.endpoint.removesuffix("/v1")
    running = asyncio.create_task(asyncio.to_thread(demonstrate, url, _say))
    stopped = asyncio.create_task(signals.stop.wait())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if running.done() and (error := running.exception()) is not None:
        _announce(f"the demonstration failed: {error}")


def _model_id(names: list[str], model: str) -> str:
    if names:
        return names[0]
    if model == "demo":
        from radixgrove.worker.agent.demo_model import NAME

        return NAME
    return Path(model).expanduser().resolve().name


up = SettingsCommand(
    "up",
    # The router's first: `host`, `port` and the like mean the endpoint.
    params=[
        *setting_options(
            "up",
            "router",
            "worker",
            without=AMBIGUOUS | {"replica_id", "advertise_url", "nodes", "node_rank", "master"},
        ),
        click.Option(
            ["--demonstrate", "show_requests"],
            is_flag=True,
            help="Send three requests when ready; print answers, replicas and cached tokens.",
        ),
        click.Option(
            ["--follow"],
            is_flag=True,
            help="Show all log lines of all parts here, requests too; so does --log-level.",
        ),
        click.Option(
            ["--log-dir"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Where the parts' logs go (~/.local/state/radixgrove/up-PORT), a file each.",
        ),
    ],
    callback=_up,
    help="Run a whole cluster on this machine: Redis, router, workers. Ctrl-C drains and ends it.",
)
