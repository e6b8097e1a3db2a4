"""A small HTTP client for the commands that talk to a running cluster; standard library only."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from radixgrove.protocol.errors import PeerError
from radixgrove.service import exit_codes

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8001"
_MAX_ANSWER = 64 << 20
_UNKNOWN_URL = "unknown_url"  # code of the error, as `protocol.openai.errors` gives it


class _Access(NamedTuple):
    """How people say where one of a router's ports is, and what opens it."""

    flag: str
    address: str
    key_variables: tuple[str, ...]  # the first that is set counts

    def key(self) -> str | None:
        """From the environment: a command line is everyone's to read."""
        return next(filter(None, map(_variable, self.key_variables)), None)

    def key_needed(self, where: str) -> str:
        """What to do about a key that is refused, or asked for."""
        source = next(filter(_variable, self.key_variables), None)
        if source is None:
            return f"{where} asks for a key: set {self.key_variables[0]}"
        return f"{where} refuses the key of {source}"


_API = _Access(
    "--url",
    f"the API's address ({DEFAULT_URL} by default)",
    ("RADIXGROVE_API_KEY", "OPENAI_API_KEY"),
)
_MANAGEMENT = _Access(
    "--management-url",
    f"the address of a router's management port ({DEFAULT_MANAGEMENT_URL} by default)",
    ("RADIXGROVE_MANAGEMENT_KEY",),
)


class Unreachable(PeerError, click.ClickException):
    """There is no answer, or not one of Radixgrove; or the key is refused."""

    exit_code = exit_codes.UNREACHABLE


class RequestRefused(PeerError, click.ClickException):
    """The server answered with an error; the message is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


@contextmanager
def request(
    url: str,
    method: str,
    path: str,
    *,
    body: Any = None,
    key: str | None = None,
    timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """One request; the response is open while the block runs and is aborted by leaving it.

    Raises:
        Unreachable: no connection, or it broke.
        RequestRefused: an error status.
    """
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.netloc}"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)
    sent = {"content-type": "application/json", **(headers or {})}
    if key:
        sent["authorization"] = f"Bearer {key}"
    try:
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, prefix + path, body=data, headers=sent)
        response = connection.getresponse()
        if response.status >= http.client.BAD_REQUEST:
            raise _failure(response, where, path)
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{where} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()


def fetch(url: str, method: str, path: str, **options: Any) -> Any:
    """The JSON body of one request."""
    with request(url, method, path, **options) as response:
        try:
            return json.loads(response.read(_MAX_ANSWER))
        except ValueError:
            raise Unreachable(f"{url} does not answer in JSON: is it a Radixgrove?") from None


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events, up to `[DONE]`.

    Raises:
        RequestRefused: the server reported an error in the stream.
        Unreachable: the stream ended without `[DONE]`: the answer is cut short.
    """
    for line in response:
        if not line.startswith(b"data:"):
            continue  # comments and blank lines
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict) and "error" in event:
            raise RequestRefused(response.status, str(event["error"].get("message")))
        yield event
    raise Unreachable("the stream ended early: the answer is incomplete")


def _failure(response: http.client.HTTPResponse, where: str, path: str) -> click.ClickException:
    body = response.read(1 << 16)
    code = None
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message = http.client.responses.get(response.status, "error")
        code = _UNKNOWN_URL
    access = _API if path.startswith("/v1/") else _MANAGEMENT
    if response.status == http.client.UNAUTHORIZED:
        return Unreachable(access.key_needed(where))
    if response.status == http.client.NOT_FOUND and code == _UNKNOWN_URL:
        return Unreachable(f"{where} has no {path}: {access.flag} is {access.address}")
    return RequestRefused(response.status, message)


def router_status(url: str) -> dict[str, Any]:
    """What a router says of itself and its replicas."""
    status = fetch(url, "GET", "/status", key=management_key())
    if not isinstance(status, dict) or "replicas" not in status:
        raise Unreachable(f"{url} is no router's: {_MANAGEMENT.flag} is {_MANAGEMENT.address}")
    return status


def management_key() -> str | None:
    return _MANAGEMENT.key()


def api_key() -> str | None:
    return _API.key()


def _variable(name: str) -> str | None:
    """Without the end of line that is often behind a key."""
    return os.environ.get(name, "").strip() or None


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


class _Address(click.ParamType[str]):
    """`http://host:port`, where the scheme may be left out."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url = _with_scheme(value)
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            self.fail(f"{value!r} is not like {DEFAULT_URL}", param, ctx)
        return url


url_option = click.option(
    "--url",
    type=_Address(),
    envvar="RADIXGROVE_URL",
    default=DEFAULT_URL,
    show_default=True,
    help="Endpoint; also RADIXGROVE_URL. Its key comes from RADIXGROVE_API_KEY.",
)
management_url_option = click.option(
    "--management-url",
    type=_Address(),
    envvar="RADIXGROVE_MANAGEMENT_URL",
    default=DEFAULT_MANAGEMENT_URL,
    show_default=True,
    help="Management address of a router; also RADIXGROVE_MANAGEMENT_URL. Its key comes from "
    "RADIXGROVE_MANAGEMENT_KEY.",
)
