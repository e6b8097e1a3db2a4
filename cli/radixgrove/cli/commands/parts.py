"""`radixgrove worker` and `radixgrove router`: one part in the foreground."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import click

from radixgrove.cli.options import SettingsCommand, setting_options
from radixgrove.cli.resolving import resolve_part
from radixgrove.service import exit_codes


def _run(part: str, module: str, config: str | None, flags: dict[str, Any]) -> int:
    settings = resolve_part(part, config, flags).settings
    run: Callable[[Any], int | None] = _load(part, module)
    return run(settings) or exit_codes.OK


def _load(part: str, module: str) -> Callable[[Any], int | None]:
    """
    Raises:
        ClickException: a library of the part's extra is missing; the text says how to get it.
    """
    try:
        run: Callable[[Any], int | None] = importlib.import_module(module).run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("radixgrove"):
            raise
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'radixgrove[{part}]'"
        ) from error
    return run


def _worker(config: str | None, **flags: Any) -> int:
    return _run("worker", "radixgrove.worker.agent.agent", config, flags)


def _router(config: str | None, **flags: Any) -> int:
    return _run("router", "radixgrove.router.main", config, flags)


worker = SettingsCommand(
    "worker",
    params=setting_options("worker"),
    callback=_worker,
    help="Run one worker: an engine and its HTTP frontends, until SIGTERM drains it.",
)
router = SettingsCommand(
    "router",
    params=setting_options("router"),
    callback=_router,
    help="Run a router: one OpenAI-compatible endpoint before all replicas.",
)
