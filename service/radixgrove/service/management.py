"""The management application of every part: a port and a key of its own, never the API's.

`GET /livez`, `/health` and `/readyz` need no key (probes). With one, as `Authorization: Bearer
KEY`: `GET /status`, `POST /log-level`, and what the part adds.

Without a key the port is this machine's alone, but web pages that its user opens reach it too. Such
requests say where they come from: a `Host` that is not this machine's, an `Origin` that is not this
port, a `Sec-Fetch-Site` of another one, or a body in a form's content type is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Request, Response

from radixgrove.protocol.foreign import decode_json
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import LogLevel
from radixgrove.service import asgi, auth
from radixgrove.service.api import JSON, Api, reply
from radixgrove.service.asgi import App, Receive, Scope, Send
from radixgrove.service.listening import is_loopback

MAX_BODY_BYTES = 1 << 16


class LevelChange(msgspec.Struct):
    """The body and the answer of `POST /log-level`."""

    level: LogLevel


class ManagementApi(Api):
    """What every part has. Add routes with `read` and `act`, then serve `guarded()`."""

    def __init__(
        self,
        title: str,
        *,
        key: str | None,
        trouble: Callable[[], str],
        status: Callable[[], Any],
        status_type: Any,
        set_log_level: Callable[[LogLevel], Awaitable[None]],
    ) -> None:
        """
        Args:
            key: None: none is asked for, and only this machine is served.
            trouble: why the part is not ready; empty when it is.
            status: makes the answer of `/status`, of `status_type`.
        """
        super().__init__(title, needs_key=key is not None)
        self._key = key

        @self.probe("/livez", "/health")
        def livez() -> str:
            """Whether the process answers."""
            return ""

        self.probe("/readyz")(trouble)

        @self.read("/status", status_type)
        async def status_() -> Response:
            """The part's state."""
            return reply(status())

        @self.act("/log-level", LevelChange, body=LevelChange)
        async def log_level(request: Request) -> Response:
            """Changes the log level of all processes of the part."""
            change = _level(await request.body())
            await set_log_level(change.level)
            return reply(change)

    def guarded(self) -> App:
        """The whole application, to be served."""
        return asgi.build(_Guard(self, self._key), max_body_bytes=MAX_BODY_BYTES)


def _level(body: bytes) -> LevelChange:
    try:
        return decode_json(body, LevelChange)
    except ValueError:
        names = ", ".join(LogLevel)
        raise errors.invalid(f"'level' must be one of {names}.", "level") from None


class _Guard:
    """Lets requests pass that have the key, or, where there is none, come from this machine."""

    def __init__(self, app: App, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in auth.PUBLIC_PATHS:
            if self._key is None:
                _check_local(scope)
            else:
                _check_key(scope, self._key)
        await self._app(scope, receive, send)


def _check_key(scope: Scope, key: str) -> None:
    authorization = asgi.header(scope, "authorization")
    if not auth.same_secret(auth.bearer_key(authorization), key):
        raise errors.unauthorized(given=bool(authorization))


def _check_local(scope: Scope) -> None:
    """
    Raises:
        ApiError: 403 or 415: a page of another site may have sent this.
    """
    hosts, origins = _all(scope, b"host"), _all(scope, b"origin")
    if not all(map(_names_this_machine, hosts)):
        raise _foreign("Host")
    if not set(origins) <= {f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")}:
        raise _foreign("Origin")
    if not set(_all(scope, b"sec-fetch-site")) <= {"same-origin", "none"}:
        raise _foreign("Sec-Fetch-Site")
    if scope["method"] not in ("GET", "HEAD") and _has_body(scope):
        asgi.require_content_type(scope, JSON)


def _all(scope: Scope, name: bytes) -> list[str]:
    return [bytes(value).decode("latin-1") for key, value in scope["headers"] if key == name]


def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _has_body(scope: Scope) -> bool:
    """A form's content type says so too, even of nothing."""
    length = asgi.header(scope, "content-length") or "0"
    names = {bytes(name) for name, _ in scope["headers"]}
    return length != "0" or not names.isdisjoint({b"transfer-encoding", b"content-type"})


def _foreign(header: str) -> ApiError:
    return ApiError(
        403,
        f"Without a management key only this machine is served: the {header} header names another "
        "one. Use 127.0.0.1, or set management_key.",
        code="foreign_origin",
    )
