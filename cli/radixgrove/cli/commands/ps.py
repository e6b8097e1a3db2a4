"""`radixgrove ps`: the fleet on one screen."""

from __future__ import annotations

import json
from typing import Any

import click

from radixgrove.cli.client import management_url_option, router_status

_HEADS = (
    *("REPLICA", "MODEL", "STATE", "RUN", "QUEUE", "QUEUED TOKENS"),
    *("KV", "KV HITS", "HOST", "HOST HITS", "AGE", "DEVICE"),
)


@click.command(
    help="Show replicas, their state and load on one screen. KV and HOST: how full pool and host "
    "tier are; hits: the share of prompt tokens that each of them had."
)
@management_url_option
@click.option("--json", "as_json", is_flag=True, help="Print the router's own answer.")
def ps(management_url: str, as_json: bool) -> None:
    status = router_status(management_url)
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    click.echo(
        f"router {status['router']}   policy {status['policy']}   redis {status['redis']}   "
        f"in flight {status['in_flight']}"
    )
    rows = [_HEADS, *(_row(replica) for replica in status["replicas"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    if not status["replicas"]:
        click.echo("no replicas")


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        replica["replica"],
        replica["model"] or "-",
        replica["state"],
        _number(replica["running"]),
        _number(replica["waiting"]),
        _number(replica["waiting_tokens"]),
        _share(replica["kv_use"]),
        _share(_less(replica["hit_rate"], replica["host_hit_rate"])),
        _share(replica["host_use"]),
        _share(replica["host_hit_rate"]),
        age(replica["generation_age"]),
        replica["device"] or "-",
    )


def _less(all_hits: float | None, from_host: float | None) -> float | None:
    return None if all_hits is None else max(0.0, all_hits - (from_host or 0.0))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def age(seconds: float | None) -> str:
    """`42s`, `17m`, `5h`, `3d`."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"
