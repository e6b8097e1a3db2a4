"""The router's HTTP surface: OpenAI's endpoints, health, metrics; and management apart from it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.responses import ModelList, ModelObject
from radixgrove.protocol.settings import LogLevel, RouterSettings, reveal
from radixgrove.router.exposition import metrics_text
from radixgrove.router.fleet import Fleet
from radixgrove.router.proxy import Proxy
from radixgrove.router.replicas import Service
from radixgrove.router.status import RouterStatus
from radixgrove.service import asgi
from radixgrove.service.api import reply
from radixgrove.service.asgi import App, Message, Receive, Scope, Send
from radixgrove.service.auth import PUBLIC_PATHS, ApiKeys, may_scrape
from radixgrove.service.management import ManagementApi

logger = logging.getLogger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class DrainedReplica(msgspec.Struct):
    replica: str
    state: str = "draining"


class _FastPath:
    """Completions go straight to the proxy: FastAPI's own handling would cost as much as the rest.

    FastAPI keeps everything else, behind `guard`, and the two routes too, for their 405. The proxy
    authenticates by itself: it needs the principal.
    """

    def __init__(self, app: FastAPI, proxy: Proxy, guard: Callable[[Scope], None]) -> None:
        self._app = app
        self._proxy = proxy
        self._guard = guard
        for path in (CHAT, COMPLETIONS):
            app.router.routes.append(Route(path, self, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path in (CHAT, COMPLETIONS) and scope["method"] == "POST":
            await self._proxy.handle(scope, receive, send, chat=path == CHAT)
        else:
            if scope["type"] == "http":
                self._guard(scope)
            await self._app(scope, receive, send)


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


def _fastapi() -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.exception_handler(ApiError)
    async def shaped(request: Request, error: ApiError) -> Response:
        return Response(error.body(), error.status, error.headers, "application/json")

    return app


def make_app(settings: RouterSettings, keys: ApiKeys, fleet: Fleet, proxy: Proxy) -> App:
    """The public application."""
    app = _fastapi()

    def get(path: str) -> Callable[[Endpoint], Endpoint]:
        return app.api_route(path, methods=["GET", "HEAD"])

    @get("/v1/models")
    async def models() -> Response:
        services = sorted(fleet.services, key=lambda service: service.model)
        data = [_model(service, name) for service in services for name in service.models]
        return _json(ModelList(data))

    @get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return _json(_model(fleet.resolve(model), model))

    @get("/livez")
    async def livez() -> Response:
        return Response("ok", media_type="text/plain")

    @get("/readyz")
    async def readyz(request: Request) -> Response:
        alone = request.query_params.get("without-replicas") == "true"
        trouble = _trouble(fleet, proxy, alone=alone)
        if trouble:
            raise errors.overloaded(trouble)
        return Response("ok", media_type="text/plain")

    @get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(), media_type=CONTENT_TYPE_LATEST)

    management = reveal(settings.management_key)

    def guard(scope: Scope) -> None:
        """Deny by default: every path but the public ones needs an API key.

        Raises:
            ApiError: 401.
        """
        path, given = scope["path"], asgi.header(scope, "authorization")
        if path not in PUBLIC_PATHS and not may_scrape(path, given, management):
            keys.authenticate(given)

    built = asgi.build(_FastPath(app, proxy, guard), max_body_bytes=settings.max_body_bytes)
    return CloseOnDrain(built, proxy)


def _model(service: Service, name: str) -> ModelObject:
    limits = service.limits
    return ModelObject(
        id=name,
        created=service.created,
        max_model_len=limits.max_model_len if limits is not None else None,
        root=None if name == service.model else service.model,
    )


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


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
        """No new requests for a replica, from any router."""
        await fleet.drain(replica_id)
        logger.info("draining replica %s on request", replica_id)
        return reply(DrainedReplica(replica_id))

    return api.guarded()


def _trouble(fleet: Fleet, proxy: Proxy, *, alone: bool) -> str:
    """Why the router takes no requests. `alone`: it need not have a replica to be ready.

    A router holds requests until a replica comes: to those who ask for the router alone (the probes
    of Kubernetes, scale from zero) it is ready once it knows what there is to serve.
    """
    if proxy.draining:
        return "The server is shutting down."
    if not fleet.ready() and not (alone and fleet.informed):
        return "No replica is ready."
    return ""
