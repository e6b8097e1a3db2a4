"""A small HTTP client for the commands that talk to a running cluster; standard library only."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import click

from radixgrove.protocol.errors import PeerError
from radixgrove.service import exit_codes

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8001"
_MAX_ANSWER = 64 << 20


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
    parts = urlsplit(url if "://" in url else f"http://{url}")
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
            raise _failure(response)
        yield response
    except (OSError, http.client.HTTPException) as error:
        where = f"{parts.scheme}://{parts.netloc}"
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


def _failure(response: http.client.HTTPResponse) -> click.ClickException:
    body = response.read(1 << 16)
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = http.client.responses.get(response.status, "error")
    if response.status == http.client.UNAUTHORIZED:
        return Unreachable(message)
    return RequestRefused(response.status, message)


def management_key() -> str | None:
    """Keys come from the environment: a command line is everyone's to read."""
    return _variable("RADIXGROVE_MANAGEMENT_KEY")


def api_key() -> str | None:
    return _variable("RADIXGROVE_API_KEY") or _variable("OPENAI_API_KEY")


def _variable(name: str) -> str | None:
    """Without the end of line that is often behind a key."""
    return os.environ.get(name, "").strip() or None


url_option = click.option(
    "--url",
    envvar="RADIXGROVE_URL",
    default=DEFAULT_URL,
    show_default=True,
    help="Endpoint; also RADIXGROVE_URL. Its key comes from RADIXGROVE_API_KEY.",
)
management_url_option = click.option(
    "--management-url",
    envvar="RADIXGROVE_MANAGEMENT_URL",
    default=DEFAULT_MANAGEMENT_URL,
    show_default=True,
    help="Management address of a router; also RADIXGROVE_MANAGEMENT_URL. Its key comes from "
    "RADIXGROVE_MANAGEMENT_KEY.",
)
