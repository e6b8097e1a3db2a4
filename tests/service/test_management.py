"""The management application: who may use it, and what its document says."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import Response

from radixgrove.protocol.settings import LogLevel
from radixgrove.service.api import reply
from radixgrove.service.management import ManagementApi

PORT = 8001
HOST = f"127.0.0.1:{PORT}"


class Status(msgspec.Struct):
    state: str = "calm"


class Part:
    """A part that is managed, and remembers what was asked of it."""

    def __init__(self, key: str | None = None) -> None:
        self.trouble = ""
        self.drained = 0
        self.level: LogLevel | None = None
        api = ManagementApi(
            "A part",
            key=key,
            trouble=lambda: self.trouble,
            status=Status,
            status_type=Status,
            set_log_level=self._set_log_level,
        )

        @api.act("/drain", Status)
        async def drain() -> Response:
            self.drained += 1
            return reply(Status("draining"))

        @api.act("/broken", Status)
        async def broken() -> Response:
            raise OSError("/home/secret/path")

        self.app = api.guarded()

    async def _set_log_level(self, level: LogLevel) -> None:
        self.level = level

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, **request)


@pytest.mark.parametrize("path", ["/livez", "/health"])
async def test_a_process_that_answers_is_alive(path: str) -> None:
    part = Part(key="m")
    part.trouble = "starting"
    assert (await part.ask("GET", path)).json() == {"status": "ok"}


async def test_readiness_says_what_is_wrong() -> None:
    part = Part(key="m")
    assert (await part.ask("GET", "/readyz")).status_code == 200
    part.trouble = "starting"
    answer = await part.ask("GET", "/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "starting"})
    assert (await part.ask("HEAD", "/readyz")).status_code == 503


@pytest.mark.parametrize(
    "request_",
    [("GET", "/status"), ("POST", "/drain"), ("POST", "/log-level"), ("GET", "/unknown")],
)
async def test_everything_but_probes_needs_the_key(request_: tuple[str, str]) -> None:
    part = Part(key="m")
    for headers in ({}, {"authorization": "Bearer n"}, {"authorization": "m"}):
        answer = await part.ask(*request_, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert part.drained == 0


async def test_the_key_is_enough_from_everywhere() -> None:
    part = Part(key="m")
    headers = {"authorization": "Bearer m", "host": "worker-0.models.svc:8101"}
    assert (await part.ask("GET", "/status", headers=headers)).json() == {"state": "calm"}
    form = headers | {"content-type": "application/x-www-form-urlencoded"}  # curl -d
    answer = await part.ask("POST", "/log-level", content=b'{"level":"debug"}', headers=form)
    assert (answer.status_code, part.level) == (200, LogLevel.DEBUG)


FOREIGN = {
    "a page of another site": {"origin": "http://evil.example"},
    "a page on another port": {"origin": "http://127.0.0.1:3000"},
    "a page without an origin": {"origin": "null"},
    "a page that says no more": {"sec-fetch-site": "cross-site"},
    "a name that was bound to this machine": {"host": f"evil.example:{PORT}"},
    "the same, with its own origin": {
        "host": f"evil.example:{PORT}",
        "origin": f"http://evil.example:{PORT}",
    },
    "an address of the network": {"host": f"192.168.1.2:{PORT}"},
    "no address": {"host": "[::1"},
    "a form": {"content-type": "text/plain"},
    "another form": {"content-type": "multipart/form-data; boundary=x"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=list(FOREIGN))
@pytest.mark.parametrize("body", [b"", b"x"])
async def test_without_a_key_no_web_page_manages(headers: dict[str, str], body: bytes) -> None:
    part = Part()
    answer = await part.ask("POST", "/drain", content=body, headers=headers)
    assert answer.status_code in (403, 415)
    assert part.drained == 0
    if "content-type" not in headers:
        answer = await part.ask("GET", "/status", headers=headers)
        assert answer.json()["error"]["code"] == "foreign_origin"


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "localhost:9", "[::1]:8001", "LOCALHOST"])
async def test_without_a_key_this_machine_manages(host: str) -> None:
    part = Part()
    headers = {"host": host, "origin": f"http://{host}"}
    assert (await part.ask("POST", "/drain", headers=headers)).json() == {"state": "draining"}
    answer = await part.ask("POST", "/log-level", json={"level": "error"}, headers=headers)
    assert (answer.status_code, part.level) == (200, LogLevel.ERROR)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"level":"loud"}', b"\xff"])
async def test_unknown_levels_are_refused(body: bytes) -> None:
    part = Part()
    answer = await part.ask(
        "POST", "/log-level", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "level")
    assert part.level is None


async def test_failures_are_shaped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = await Part().ask("POST", "/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_the_document_says_what_is_served() -> None:
    document = (
        await Part(key="m").ask("GET", "/openapi.json", headers={"authorization": "Bearer m"})
    ).json()
    served = {(path, method) for path, methods in document["paths"].items() for method in methods}
    probes = {
        (path, method) for path in ("/livez", "/health", "/readyz") for method in ("get", "head")
    }
    assert served == probes | {
        ("/status", "get"),
        ("/status", "head"),
        ("/log-level", "post"),
        ("/drain", "post"),
        ("/broken", "post"),
    }
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    change = document["paths"]["/log-level"]["post"]
    assert change["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/LevelChange"
    }
    assert document["components"]["schemas"]["LogLevel"]["enum"] == sorted(LogLevel)
    assert change["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/livez"]["get"]
