"""Entry point: kopf's handlers, which only feed the queue, and the process around them."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import kopf

from radixgrove.operator.api import metrics, names
from radixgrove.operator.api.config import OperatorConfig, load
from radixgrove.operator.api.objects import ChildObject, NodeObject, ServiceObject
from radixgrove.operator.controller.app import App
from radixgrove.operator.controller.health import HealthServer
from radixgrove.operator.kube.client import KINDS, Kube, api_client
from radixgrove.operator.kube.election import LeaderElection
from radixgrove.service import logs

logger = logging.getLogger(__name__)

# A change of these kinds leads back to a service. Not Secrets: watching them means reading them.
WATCHED = (
    "StatefulSet",
    "Deployment",
    "Pod",
    "Service",
    "ConfigMap",
    "ServiceAccount",
    "PersistentVolumeClaim",
    "Job",
    "PodDisruptionBudget",
    "HorizontalPodAutoscaler",
    "NetworkPolicy",
)
_BEAT_EVERY = 0.5  # seconds; `stop` is noticed as often


def register(registry: kopf.OperatorRegistry, app: App) -> None:
    """Handlers of events only: no finalizers, no annotations, no state of kopf on any object."""

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def service_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        app.service_event(type, cast(ServiceObject, dict(body)))

    @kopf.on.event("", "v1", "nodes", registry=registry)
    async def node_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        app.node_event(type, cast(NodeObject, dict(body)))

    for kind in WATCHED:
        where = KINDS[kind]

        async def child_changed(
            type: str | None, body: kopf.Body, kind: str = kind, **_: Any
        ) -> None:
            app.child_event(kind, type, cast(ChildObject, dict(body)))

        kopf.on.event(
            where.group, where.version, where.plural, id=f"{kind}-changed", registry=registry
        )(child_changed)


class _Backoffs:
    """Endless: a verb that is missing may be given back any time, and no watch may end for it."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0)
        yield from itertools.repeat(5.0)


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    for kind in WATCHED:
        where = KINDS[kind]
        selector = f"{names.MANAGED_BY}={names.MANAGER}"
        settings.watching.label_selectors[where.group, where.version, where.plural] = selector
    return settings


async def watch(app: App, config: OperatorConfig, stop: threading.Event) -> None:
    """Runs kopf until `stop`. Raises what makes its watches end."""
    registry = kopf.get_default_registry()
    register(registry, app)
    ending = asyncio.Event()

    async def beat() -> None:
        while not stop.is_set():
            app.beat()
            await asyncio.sleep(_BEAT_EVERY)
        ending.set()

    beating = asyncio.create_task(beat())
    try:
        await kopf.operator(
            registry=registry,
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not config.namespaces,
            namespaces=config.namespaces,
            # Left to itself kopf asks for the user's name, which a container's numeric user lacks.
            identity=socket.gethostname(),  # type: ignore[arg-type]
            stop_flag=ending,
        )
    finally:
        stop.set()
        beating.cancel()


def run(config: OperatorConfig) -> int:
    """Campaigns, and operates while it leads. 0 after a signal, 1 when the lease was lost."""
    stop, leading = threading.Event(), threading.Event()
    lost = threading.Event()
    election = LeaderElection(config, os.environ.get("POD_NAME", ""))
    api = api_client()
    unfenced = Kube(api, lambda seconds: True, config.election.duration / 3)
    app = App(Kube(api, election.may_write, config.request_timeout), config, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def on_lost() -> None:
        lost.set()
        stop.set()

    campaign = threading.Thread(
        target=election.run, args=(unfenced, leading.set, on_lost), name="election", daemon=True
    )

    def trouble() -> str:
        if campaign.ident is not None and not (campaign.is_alive() or stop.is_set()):
            return "the campaign for the lease has ended"
        return app.trouble() if leading.is_set() else ""

    with HealthServer(config.health_port, trouble):
        campaign.start()
        while not stop.wait(0.2):
            if leading.is_set():
                app.beat()
                app.start()
                asyncio.run(watch(app, config, stop))
        app.stop()
        # The lease is given back only when nothing of this process writes any more.
        election.stopping.set()
        campaign.join(config.election.duration)
    if lost.is_set():
        logger.error("the lease was lost")
        return 1
    return 0


def with_pod_ips(config: OperatorConfig, text: str) -> OperatorConfig:
    """`text`: this pod's `status.podIPs` as the downward API writes them; empty outside of any."""
    addresses = [address for address in text.split(",") if address]
    return config.model_copy(update={"pod_ips": addresses}) if addresses else config


def main() -> None:
    parser = argparse.ArgumentParser(prog="radixgrove-operator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the operator")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config)
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.config}: {error}")
    logs.configure("info", json=config.log_json)
    logs.count_drops(metrics.REGISTRY)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    sys.exit(run(with_pod_ips(config, os.environ.get("POD_IPS", ""))))


if __name__ == "__main__":
    main()
