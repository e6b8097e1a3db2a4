"""FastAPI for the routes that people and scripts call, documented by the msgspec types they speak.

`/openapi.json` says what is served: every route is declared with the type of its answer, and of its
body where it has one. Hot paths go past FastAPI: 1 µs a request, where a plain Starlette route in
it costs 17 µs and a route of its own 80 µs (Python 3.11, one core).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.routing import Route

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError, ErrorBody
from radixgrove.service.asgi import ANSWERED, App, Receive, Scope, Send, state
from radixgrove.service.auth import PUBLIC_PATHS

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
Schema = dict[str, Any]

JSON = "application/json"
REFERENCE = "#/components/schemas/{name}"


class Health(msgspec.Struct):
    """The answer to a probe: `ok`, or what is wrong (with status 503)."""

    status: str


class Api(FastAPI):
    """An application; its handlers return `reply(…)`, or raise `ApiError`."""

    def __init__(self, title: str, *, needs_key: bool) -> None:
        """`needs_key`: the document says that a key is needed beyond the public paths."""
        super().__init__(
            title=title,
            version=version("radixgrove"),
            docs_url=None,  # its pages load scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers={
                ApiError: _refused,
                RequestValidationError: _malformed,
                Exception: _failed,
            },
        )
        self._needs_key = needs_key
        self._types: list[Any] = [ErrorBody]
        self._hot: dict[str, App] = {}
        self._hot_operations: dict[str, Schema] = {}
        self._own_schemas: dict[str, Schema] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hot = self._hot.get(scope.get("path", ""))
        if hot is not None and scope["method"] == "POST":
            await hot(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    # ---- routes ------------------------------------------------------------------------------

    def read(self, path: str, answer: Any) -> Callable[[Handler], Handler]:
        """Registers the handler of GET and HEAD.

        Args:
            answer: the msgspec type of the JSON, or a media type.
        """
        return self._register(path, ["GET", "HEAD"], responses=self._answers(200, answer))

    def act(
        self, path: str, answer: Any, *, body: Any = None, status: int = 200
    ) -> Callable[[Handler], Handler]:
        """Registers the handler of POST; `body` is the msgspec type that it reads, if any."""
        content = None if body is None else {JSON: {"schema": self.schema(body)}}
        extra = None if body is None else {"requestBody": {"required": True, "content": content}}
        responses = self._answers(status, answer)
        return self._register(
            path, ["POST"], responses=responses, openapi_extra=extra, status_code=status
        )

    def probe(self, *paths: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
        """Registers a function that says what is wrong, or nothing, as a probe of health."""

        def register(trouble: Callable[..., str]) -> Callable[..., str]:
            for path in paths:
                self.read(path, Health)(_probing(trouble))
            return trouble

        return register

    def hot(
        self, path: str, handler: App, operation: Schema, schemas: dict[str, Schema] | None = None
    ) -> None:
        """A POST that goes past FastAPI, which keeps its path for 405.

        Args:
            operation: how the document describes it.
            schemas: of the document, in place of those of the types with these names.
        """
        self._hot[path] = handler
        self._hot_operations[path] = operation
        self._own_schemas.update(schemas or {})
        self.router.routes.append(Route(path, _Raw(handler), methods=["POST"]))

    def _register(
        self, path: str, methods: list[str], **options: Any
    ) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.add_api_route(
                path,
                handler,
                methods=methods,
                response_class=Response,
                response_model=None,
                **options,
            )
            return handler

        return register

    # ---- the document ------------------------------------------------------------------------

    def schema(self, kind: Any) -> Schema:
        """A reference to the schema of a msgspec type, which the document then has."""
        self._types.append(kind)
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
        return schema

    def _answers(self, status: int, answer: Any) -> dict[int | str, Schema]:
        return {status: self.content(answer), "default": self.error}

    def content(self, answer: Any) -> Schema:
        """A response of the document; `answer` as in `read`."""
        if isinstance(answer, str):
            return {"description": "Success", "content": {answer: {"schema": {"type": "string"}}}}
        return {"description": "Success", "content": {JSON: {"schema": self.schema(answer)}}}

    @property
    def error(self) -> Schema:
        return self.content(ErrorBody) | {"description": "Refused, or failed"}

    def openapi(self) -> Schema:
        if self.openapi_schema is None:
            with warnings.catch_warnings():  # of one id for GET and HEAD, mended in `_finish`
                warnings.simplefilter("ignore", UserWarning)
                self._finish(super().openapi())
        return super().openapi()

    def _finish(self, document: Schema) -> None:
        """Adds what FastAPI does not know: hot paths, msgspec's schemas, keys."""
        for path, operation in self._hot_operations.items():
            document["paths"][path] = {"post": operation}
        for path, methods in document["paths"].items():
            self._finish_path(path, methods)
        _, schemas = msgspec.json.schema_components(self._types, ref_template=REFERENCE)
        document["components"] = {"schemas": schemas | self._own_schemas}
        if self._needs_key:
            schemes = {"key": {"type": "http", "scheme": "bearer"}}
            document["components"]["securitySchemes"] = schemes

    def _finish_path(self, path: str, methods: dict[str, Schema]) -> None:
        for method, operation in methods.items():
            operation["operationId"] = re.sub(r"[^A-Za-z0-9]+", "_", method + path).strip("_")
            if method == "head":
                operation["responses"] = {
                    status: {"description": response["description"]}
                    for status, response in operation["responses"].items()
                }
            if self._needs_key and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]


class _Raw:
    """An ASGI callable that Starlette routes to as it is, without a request object around it."""

    def __init__(self, handler: App) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


def reply(answer: Any, status: int = 200) -> Response:
    """A msgspec value as JSON."""
    return Response(msgspec.json.encode(answer), status, media_type=JSON)


def _probing(trouble: Callable[..., str]) -> Callable[[], Awaitable[Response]]:
    async def probe() -> Response:
        found = trouble()
        return reply(Health(found or "ok"), 503 if found else 200)

    probe.__doc__ = trouble.__doc__
    return probe


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, JSON)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    name = str(error.errors()[0]["loc"][-1])
    return await _refused(request, errors.invalid(f"Invalid value for '{name}'.", name))


async def _failed(request: Request, error: Exception) -> Response:
    """What `asgi.ErrorShape` logs."""
    state(request.scope)[ANSWERED] = True
    return await _refused(request, errors.internal())
