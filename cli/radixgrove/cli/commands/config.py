"""`radixgrove config show`: each value and its source."""

from __future__ import annotations

from typing import Any

import click

from radixgrove.cli.configuration import Resolved, show
from radixgrove.cli.resolving import UpParts, resolve_part


@click.group(help="Show settings and where each came from.")
def config() -> None:
    pass


@config.command("show", help="Print each setting of a part, its value and its source.")
@click.argument("part", type=click.Choice(["worker", "router", "up"]), default="up")
@click.option("--config", "path", metavar="FILE", help="YAML file of settings.")
@click.option("--changed", is_flag=True, help="Only what differs from the defaults.")
def show_settings(part: str, path: str | None, changed: bool) -> None:
    if part != "up":
        _print(part, resolve_part(part, path, {}), changed)
        return
    parts = UpParts(path, {})
    for name, resolved in [("up", parts.up), ("router", parts.router), ("worker", parts.worker)]:
        _print(name, resolved, changed)


def _print(part: str, resolved: Resolved[Any], changed: bool) -> None:
    rows = [
        (name, show(getattr(resolved.settings, name)), source)
        for name, source in resolved.sources.items()
        if source != "default" or not changed
    ]
    click.echo(f"{part}:")
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, value, source in rows:
        click.echo(f"  {name + ':':<{widths[0] + 1}} {value:<{widths[1]}}  # {source}")
