"""A real frontend process before a fake engine, and clients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.frontend.__main__ import main
from radixgrove.worker.messages import Submit
from radixgrove.worker.runtime import Runtime
from tests.conftest import find_free_port, wait_until
from tests.forks import Fork, Main
from tests.worker.fake_engine import FakeEngine

MODEL = "org/demo"
ALIAS = "demo-alias"
INTERNAL_KEY = "internal-key-of-the-tests"


@dataclass
class Frontend:
    """A frontend process and the engines before it, one a member."""

    engines: list[FakeEngine]
    process: Fork
    url: str
    tokenizer: Tokenizer
    log: Path

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def answer(self, text: str) -> None:
        """Let the engines generate this text for every sequence."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        for engine in self.engines:
            engine.script = lambda _: list(ids)

    def client(self, key: str = "none", **headers: str) -> httpx.Client:
        if key != "none":
            headers["authorization"] = f"Bearer {key}"
        # Plain HTTP: loading certificates would take longer than most requests.
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, verify=False)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        with self.client() as client:
            return client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    def logged(self, text: str) -> str:
        """The log, once it has this text: a request's line comes after its last byte."""
        wait_until(lambda: text in self.log.read_text(), what=f"{text!r} in the log")
        return self.log.read_text()

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        with self.client() as client:
            text = client.get("/metrics").text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


StartFrontend = Callable[..., Any]


@cache
def tokenizer_of(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@contextmanager
def running_frontend(model_dir: Path, *, main: Main = main, **settings: Any) -> Iterator[Frontend]:
    """Start a frontend with these settings; ready when this returns."""
    with TemporaryDirectory(prefix="rg-") as name:
        directory = Path(name)
        options: dict[str, Any] = {
            "model": str(model_dir),
            "served_model_name": [MODEL, ALIAS],
            "port": find_free_port(),
            "internal_key": INTERNAL_KEY,
            "grammar_timeout": 60.0,  # a slow machine is no reason to refuse
            **settings,
        }
        runtime = Runtime(directory, WorkerSettings.model_validate(options), model_dir)
        runtime.metrics_dir.mkdir()
        runtime.write()
        engines = [
            FakeEngine(runtime, lambda _: [], [runtime.frontend_socket(0, member)], member=member)
            for member in range(runtime.settings.dp)
        ]
        for engine in engines:
            engine.start()
        log = directory / "log"
        environment = {"PROMETHEUS_MULTIPROC_DIR": str(runtime.metrics_dir)}
        process = Fork(main, [name, "0"], log, environment)
        url = f"http://127.0.0.1:{options['port']}"
        frontend = Frontend(engines, process, url, tokenizer_of(model_dir), log)
        try:
            wait_until(lambda: is_ready(frontend), deadline=60, what="the frontend")
            yield frontend
        finally:
            process.kill()
            process.wait()
            for engine in engines:
                engine.stop()


def is_ready(frontend: Frontend) -> bool:
    assert frontend.process.poll() is None, frontend.log.read_text()
    try:
        with frontend.client() as client:
            return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def _shared_frontend(demo_model_dir: Path) -> Iterator[Frontend]:
    with running_frontend(demo_model_dir) as frontend:
        yield frontend


@pytest.fixture
def frontend(_shared_frontend: Frontend) -> Frontend:
    """The frontend that most tests share, its engine idle and answering `Hello world`."""
    engine = _shared_frontend.engine
    wait_until(lambda: not engine.running, what="an idle engine")
    engine.reset()
    _shared_frontend.answer("Hello world")
    return _shared_frontend


@pytest.fixture
def start_frontend(demo_model_dir: Path) -> Iterator[StartFrontend]:
    """Frontends of a test's own, with settings of its own, which it may kill."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running_frontend(demo_model_dir, **settings))


def prompt_text(frontend: Frontend, submit: Submit) -> str:
    """What the engine was asked to continue."""
    ids = [
        int.from_bytes(submit.token_ids[i : i + 4], "little")
        for i in range(0, len(submit.token_ids), 4)
    ]
    text: str = frontend.tokenizer.decode(ids, skip_special_tokens=False)
    return text
