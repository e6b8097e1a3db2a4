"""`radixgrove drain REPLICA`, and `undrain`."""

from __future__ import annotations

import time
from urllib.parse import quote

import click

from radixgrove.cli.client import fetch, management_key, management_url_option, router_status
from radixgrove.service import exit_codes

_POLL_SECONDS = 0.5


@click.command(
    help="Let a replica, or all members of a group, finish what it has and send it nothing new."
)
@click.argument("replica")
@click.option("--wait", is_flag=True, help="Return when it has nothing left to do.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="For --wait."
)
@management_url_option
def drain(replica: str, wait: bool, timeout: float, management_url: str) -> int:
    _tell(management_url, replica, "drain")
    if not wait:
        click.echo(f"{replica} is draining; `radixgrove ps` shows what it still runs")
        return exit_codes.OK
    deadline = time.monotonic() + timeout
    while True:
        left = _left(router_status(management_url), replica)
        if left == 0:
            click.echo(f"{replica} is drained")
            return exit_codes.OK
        if time.monotonic() > deadline:
            raise click.ClickException(f"{replica} still has {left} requests after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)


@click.command(help="Send a drained replica requests again.")
@click.argument("replica")
@management_url_option
def undrain(replica: str, management_url: str) -> None:
    _tell(management_url, replica, "undrain")
    click.echo(f"{replica} gets requests again")


def _tell(management_url: str, replica: str, what: str) -> None:
    path = f"/replicas/{quote(replica, safe='')}/{what}"
    fetch(management_url, "POST", path, key=management_key())


def _left(status: dict[str, list[dict[str, object]]], replica: str) -> int:
    """Requests that the replica, or group, still has; none when it is gone."""
    # A router of the release before knows no groups.
    entries = [e for e in status["replicas"] if replica in (e["replica"], e.get("group"))]
    counts = [entry[name] for entry in entries for name in ("running", "waiting", "in_flight")]
    return sum(count for count in counts if isinstance(count, int))
