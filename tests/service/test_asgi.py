"""Middleware that router and worker share, around applications of every kind of misbehaviour."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from radixgrove.protocol.openai import errors
from radixgrove.service import asgi, tracing
from radixgrove.service.asgi import App, Receive, Scope, Send

SECRET = "/home/secret/path"


def call(
    app: App, path: str = "/", *, cors_origins: list[str] | None = None, **request: Any
) -> httpx.Response:
    built = asgi.build(app, max_body_bytes=100, cors_origins=cors_origins or [])
    transport = httpx.ASGITransport(built)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(request.pop("method", "POST"), path, **request)

    return asyncio.run(send())


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await asgi.respond(send, 200, await asgi.read_body(receive))


def test_exceptions_become_a_fixed_text(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError(SECRET)

    response = call(broken)
    assert response.status_code == 500
    assert SECRET not in response.text
    assert error_of(response)["type"] == "server_error"


def test_api_errors_keep_status_headers_and_param() -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        raise errors.rate_limited(7.2)

    response = call(refusing)
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
    assert error_of(response)["code"] == "rate_limit_exceeded"


def test_a_frameworks_own_errors_are_shaped() -> None:
    app = FastAPI()

    @app.get("/known")
    def known() -> str:
        return "x"

    missing = call(app, "/unknown", method="GET")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "unknown_url"
    wrong = call(app, "/known", method="POST")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET"
    assert error_of(wrong)["code"] == "method_not_supported"


def test_a_relayed_error_is_left_alone() -> None:
    body = errors.model_not_found("m").body()

    async def relaying(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 404, body)

    assert call(relaying).content == body


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    assert call(echo, content="\ufeff{}".encode()).content == b"{}"


def test_bodies_are_bounded_declared_or_not() -> None:
    assert call(echo, content=b"x" * 100).content == b"x" * 100
    assert error_of(call(echo, content=b"x" * 101))["code"] == "request_too_large"

    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 10

    assert call(echo, content=chunks()).status_code == 413


def test_one_access_line_a_request_with_the_handlers_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        asgi.state(scope)[asgi.FIELDS]["model"] = "m"
        await asgi.respond(send, 200, b"{}")

    with caplog.at_level(logging.INFO, logger="radixgrove.access"):
        call(handler, "/v1/x", headers={"x-request-id": "id-1"})
        call(handler, "/livez")
    (record,) = [record for record in caplog.records if record.name == "radixgrove.access"]
    fields = record.__dict__["fields"]
    assert fields["request_id"] == "id-1"
    assert (fields["status"], fields["model"], fields["complete"]) == (200, "m", True)


def test_request_ids_are_bounded_and_harmless() -> None:
    assert tracing.request_id("abc-1.2:3") == "abc-1.2:3"
    for given in (None, "", "x" * 129, "a b", "a\nb", "é"):
        assert tracing.request_id(given).startswith("req-")


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_traces_continue_with_a_span_of_our_own() -> None:
    context = tracing.trace_context(f"00-{TRACE}-b7ad6b7169203331-01")
    version, trace_id, span_id, flags = context.header().split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    assert span_id != "b7ad6b7169203331"
    later = tracing.trace_context(f"01-{TRACE}-b7ad6b7169203331-00-more")
    assert later.trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-b7ad6b7169203331-01-more",
        f"00-{TRACE.upper()}-b7ad6b7169203331-01",
        "00-short-b7ad6b7169203331-01",
    ],
)
def test_malformed_traces_begin_a_new_one(header: str | None) -> None:
    context = tracing.trace_context(header)
    assert context.trace_id != TRACE
    assert len(context.trace_id) == 32


def test_error_bodies_are_openais() -> None:
    body = json.loads(errors.context_length_exceeded(100, 90, 20, "messages").body())
    assert body["error"]["message"].startswith("This model's maximum context length is 100 tokens")
    assert body["error"]["code"] == "context_length_exceeded"
    assert errors.internal().event().startswith(b'data: {"error":{')


@pytest.mark.parametrize("released", [False, True])
async def test_bodies_of_all_requests_are_bounded(released: bool) -> None:
    inside, gate = asyncio.Semaphore(0), asyncio.Event()

    async def holding(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.read_body(receive)
        if released:
            asgi.state(scope)[asgi.RELEASE_BODY]()
        inside.release()
        await gate.wait()
        await asgi.respond(send, 200, b"{}")

    app = asgi.build(holding, max_body_bytes=100, max_bodies_bytes=90)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        first = asyncio.create_task(client.post("/", content=b"x" * 100))  # alone it may be larger
        await inside.acquire()
        second = asyncio.create_task(client.post("/", content=b"x" * 60))
        await asyncio.wait(
            [second, asyncio.ensure_future(inside.acquire())], return_when=asyncio.FIRST_COMPLETED
        )
        assert second.done() != released
        gate.set()
        assert (await first).status_code == 200
        assert (await second).status_code == (200 if released else 429)
        assert (await client.post("/", content=b"x" * 60)).status_code == 200


@pytest.mark.parametrize("origins", [["https://app.example"], ["*"]])
def test_pages_of_allowed_origins_may_ask_and_read(origins: list[str]) -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        raise errors.unauthorized(given=False)

    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-a, x-b"}
    page = {"origin": "https://app.example"}
    preflight = call(refusing, method="OPTIONS", cors_origins=origins, headers=page | asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "x-a, x-b"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    refused = call(refusing, cors_origins=origins, headers=page)
    assert refused.status_code == 401
    for response in (preflight, refused):
        allowed = response.headers["access-control-allow-origin"]
        assert allowed == ("*" if origins == ["*"] else page["origin"])
        assert "access-control-allow-credentials" not in response.headers
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [[], ["https://app.example"]])
def test_pages_of_other_origins_may_not(origins: list[str]) -> None:
    headers = {"origin": "https://other.example", "access-control-request-method": "POST"}
    for method in ("OPTIONS", "POST"):
        response = call(echo, method=method, cors_origins=origins, headers=headers)
        assert "access-control-allow-origin" not in response.headers
