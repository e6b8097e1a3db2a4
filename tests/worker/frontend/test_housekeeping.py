"""Silent streams get pings, clients that do not read lose their request: sped up, in-process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.asgi import ON_DISCONNECT, Message, Scope
from radixgrove.service.auth import ApiKeys
from radixgrove.worker.frontend import app as frontend_app
from radixgrove.worker.frontend.app import Frontend
from radixgrove.worker.frontend.members import Members
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.runtime import Runtime
from tests.worker.fake_engine import FakeEngine

BODY = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 50}


def scope(on_disconnect: Callable[[Callable[[], None] | None], None] = lambda _: None) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "state": {ON_DISCONNECT: on_disconnect},
    }


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert condition(), what


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_app, "HOUSEKEEPING_SECONDS", 0.02)
    monkeypatch.setattr(frontend_app, "PING_SECONDS", 0.1)
    monkeypatch.setattr(frontend_app, "STALL_SECONDS", 0.2)


@asynccontextmanager
async def running(model_dir: Path) -> AsyncIterator[tuple[Frontend, FakeEngine]]:
    with TemporaryDirectory(prefix="rg-") as name:
        settings = WorkerSettings(served_model_name=["m"], port=1)
        runtime = Runtime(Path(name), settings, model_dir)
        members = Members(runtime, 0)
        frontend = Frontend(
            settings, ServedModel.load(model_dir, settings), members, ApiKeys.load(None)
        )
        engine = FakeEngine(
            runtime,
            lambda _: [1000 + i for i in range(50)],
            [runtime.frontend_socket(0)],
        )
        members.start()
        engine.start()
        housekeeping = asyncio.create_task(frontend.housekeeping())
        try:
            await until(lambda: members.heard, "the engine's pulse")
            yield frontend, engine
        finally:
            housekeeping.cancel()
            engine.stop()
            members.close()


async def request_then_silence(**fields: Any) -> Any:
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": json.dumps(BODY | fields).encode()}

    return receive


async def test_a_silent_stream_gets_pings(quick: None, demo_model_dir: Path) -> None:
    chunks: list[bytes] = []
    headers: list[tuple[bytes, bytes]] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            headers.extend(message["headers"])
        else:
            chunks.append(message.get("body", b""))

    async with running(demo_model_dir) as (frontend, engine):
        engine.paused.set()
        handler = asyncio.create_task(frontend.app(scope(), await request_then_silence(), send))
        await until(lambda: chunks.count(b": ping\n\n") >= 2, "two pings")
        assert set(chunks) == {b": ping\n\n"}
        engine.paused.clear()
        await asyncio.wait_for(handler, 30)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in headers
    assert b"".join(chunks).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_does_not_read_loses_its_request(
    quick: None, demo_model_dir: Path
) -> None:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the connection's buffers are full

    async with running(demo_model_dir) as (frontend, engine):
        engine.step_seconds = 0.2
        handler = asyncio.create_task(frontend.app(scope(), await request_then_silence(), send))
        await until(lambda: engine.running, "the request at the engine")
        await asyncio.wait_for(handler, 30)
        assert frontend.in_flight == 0
        await until(lambda: not engine.running, "the abort")
        assert len(engine.aborts) == 1
