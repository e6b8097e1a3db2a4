"""The router's HTTP surface: OpenAI's endpoints, health, metrics; and management apart from it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import msgspec
from fastapi import Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from radixgrove.protocol.endpoints import ENDPOINTS
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.responses import ModelList, ModelObject
from radixgrove.protocol.settings import LogLevel, RouterSettings, reveal
from radixgrove.router.encoding import Encoders
from radixgrove.router.exposition import metrics_text
from radixgrove.router.fleet import Fleet
from radixgrove.router.proxy import Proxy
from radixgrove.router.replicas import Service
from radixgrove.router.status import RouterStatus
from radixgrove.service import asgi, generation, tokenization
from radixgrove.service.api import Api, Health, reply
from radixgrove.service.asgi import App, Message, Receive, Scope, Send
from radixgrove.service.auth import ApiKeys
from radixgrove.service.guard import Guard
from radixgrove.service.management import ManagementApi

logger = logging.getLogger(__name__)


class DrainedReplica(msgspec.Struct):
    replica: str
    state: str = "draining"


class CloseOnDrain:
    """While the router drains, every answer asks its client to connect anew: elsewhere, then."""

    def __init__(self, app: App, proxy: Proxy) -> None:
        self._app = app
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, closing if self._proxy.draining else send)


def make_app(
    settings: RouterSettings, keys: ApiKeys, fleet: Fleet, proxy: Proxy, encoders: Encoders
) -> App:
    """The public application."""
    api = Api("Radixgrove router", needs_key=settings.api_keys_file is not None)
    for endpoint in ENDPOINTS:
        generation.serve(api, endpoint, partial(proxy.handle, endpoint))
    tokenization.serve(api, encoders.text_of)

    @api.probe("/livez", "/health")
    def livez() -> str:
        """Whether the process answers."""
        return ""

    @api.read("/readyz", Health)
    async def readyz(
        alone: Annotated[bool, Query(alias="without-replicas")] = False,
    ) -> Response:
        """Whether a replica is ready; `without-replicas`: whether the router itself is."""
        trouble = _trouble(fleet, proxy, alone=alone)
        if trouble:
            raise errors.overloaded(trouble)
        return reply(Health("ok"))

    @api.read("/metrics", CONTENT_TYPE_LATEST)
    async def metrics() -> Response:
        """Metrics of all processes of this router."""
        return Response(metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @api.read("/v1/models", ModelList)
    async def models() -> Response:
        """The models under all their names."""
        services = sorted(fleet.services, key=lambda service: service.model)
        data = [_model(service, name) for service in services for name in service.models]
        return reply(ModelList(data))

    @api.read("/v1/models/{model:path}", ModelObject)
    async def model(model: str) -> Response:
        """One model under one of its names."""
        return reply(_model(fleet.resolve(model), model))

    guarded = Guard(
        api,
        keys,
        management_key=reveal(settings.management_key),
        metrics_key=reveal(settings.metrics_key),
    )
    app = asgi.build(
        guarded,
        max_body_bytes=settings.max_body_bytes,
        max_bodies_bytes=settings.max_bodies_bytes,
        cors_origins=settings.cors_origins,
    )
    return CloseOnDrain(app, proxy)


def _model(service: Service, name: str) -> ModelObject:
    limits, registration = service.limits, service.registration
    return ModelObject(
        id=name,
        created=service.created,
        max_model_len=limits.max_model_len if limits is not None else None,
        root=None if name == service.model else service.model,
        output_format=registration.output_format or None if registration is not None else None,
        capabilities=registration.capabilities if registration is not None else [],
    )


def make_management_app(
    settings: RouterSettings,
    fleet: Fleet,
    proxy: Proxy,
    status: Callable[[], RouterStatus],
    set_log_level: Callable[[LogLevel], Awaitable[None]],
) -> App:
    """Operations, on a port and with a key of their own."""
    api = ManagementApi(
        "Radixgrove router: management",
        key=reveal(settings.management_key),
        trouble=lambda: _trouble(fleet, proxy, alone=False),
        status=status,
        status_type=RouterStatus,
        set_log_level=set_log_level,
    )

    @api.act("/replicas/{replica_id:path}/drain", DrainedReplica)
    async def drain(replica_id: str) -> Response:
        """No new requests for a replica, or for a group by its name, from any router."""
        await fleet.drain(replica_id)
        logger.info("draining replica %s on request", replica_id)
        return reply(DrainedReplica(replica_id))

    @api.act("/replicas/{replica_id:path}/undrain", DrainedReplica)
    async def undrain(replica_id: str) -> Response:
        """A drained replica, or group, gets requests again, from every router."""
        await fleet.undrain(replica_id)
        logger.info("replica %s gets requests again, on request", replica_id)
        return reply(DrainedReplica(replica_id, "ready"))

    return api.guarded()


def _trouble(fleet: Fleet, proxy: Proxy, *, alone: bool) -> str:
    """Why the router takes no requests. `alone`: it need not have a replica to be ready.

    A router holds requests until a replica comes: to those who ask for the router alone (the probes
    of Kubernetes, scale from zero) it is ready once it knows what there is to serve.
    """
    if proxy.draining:
        return "The server is shutting down."
    if fleet.ready() or (alone and fleet.informed):
        return ""
    return "No replica is ready." if fleet.informed else fleet.starting
