"""Each ordinary fault with the real worker, beside a load whose texts are known.

Two routers and three workers of a small random model, for all drills of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from tests.checkout import ROOT
from tests.drills.grove import (
    HEALTHY_WITHIN,
    MODEL,
    WORKERS,
    Grove,
    Part,
    growing,
    undisturbed,
    write_model,
)
from tests.drills.load import Load, ask
from tests.drills.odd_requests import odd_requests, send
from tests.drills.stage import watched
from tests.redis_faults import REFUSALS, well
from tests.router.harness import eventually

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

FAULT = 8.0  # seconds: longer than a lease
RATE = 4.0  # requests a second
KNOWN = 24  # different requests
POISON = "~"  # its embedding is no number
NEVER_POISON = {"logit_bias": {str(ord(POISON)): -100}}  # a token is a byte


def _request(number: int) -> dict[str, Any]:
    prompt = f"{number % 8} of the stories that a grove of radix trees tells: {number % KNOWN}."
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0} | NEVER_POISON


@dataclass
class RealStage:
    grove: Grove
    texts: list[tuple[str, ...]]
    clock: Path  # seconds by which the wall clock of all parts is wrong

    def shift_wall_clock(self, seconds: int) -> None:
        fresh = self.clock.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.rename(self.clock)

    @contextlib.asynccontextmanager
    async def drill(
        self, name: str, *, cuts: bool = False, losses: bool = False
    ) -> AsyncIterator[Grove]:
        """A fault, from its begin to its end, in the body."""
        grove = self.grove
        load = Load(
            [router.url for router in grove.routers],
            _request,
            RATE,
            timeout=120,
            expected=lambda number: self.texts[number % KNOWN],
        )
        subject = f"two routers, {WORKERS} workers"
        async with load:
            await eventually(grove.healthy, deadline=HEALTHY_WITHIN, what="the grove")
            async with watched(
                load,
                grove.healthy,
                grove.memory,
                f"{name} (workers)",
                subject,
                cuts=cuts,
                losses=losses,
            ):
                yield grove


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealStage]:
    directory = tmp_path_factory.mktemp("grove")
    model = directory / "model"
    model.mkdir()
    write_model(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord(POISON)] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    async with growing(directory) as grove:
        bodies = [_request(number) for number in range(KNOWN)]
        made = RealStage(
            grove, await undisturbed(directory, bodies, grove.session), directory / "clock"
        )
        made.shift_wall_clock(0)
        for part in grove.parts:
            part.environment = {
                "PYTHONPATH": str(ROOT / "tests" / "worker" / "agent"),  # sitecustomize
                "WALL_CLOCK_SHIFT": str(made.clock),
            }
            part.start()
        keeping = asyncio.create_task(grove.keep())
        yield made
        keeping.cancel()


async def _ends(part: Part, *which: str, by: int) -> None:
    """A signal to some of its processes ends the whole part, which is started anew."""
    starts = part.starts
    part.signal(by, *which)
    await eventually(lambda: part.starts > starts, deadline=120, what=f"the end of {part.name}")


async def test_an_engine_is_killed(stage: RealStage) -> None:
    async with stage.drill("An engine is killed", cuts=True) as grove:
        await _ends(grove.workers[0], "engine", by=signal.SIGKILL)


@pytest.mark.slow
async def test_an_engine_stands_still(stage: RealStage) -> None:
    async with stage.drill("An engine stands still (SIGSTOP)", cuts=True) as grove:
        await _ends(grove.workers[1], "engine", by=signal.SIGSTOP)


@pytest.mark.slow
async def test_a_frontend_is_killed(stage: RealStage) -> None:
    async with stage.drill("A frontend is killed", cuts=True) as grove:
        await _ends(grove.workers[0], "frontend", by=signal.SIGKILL)


@pytest.mark.slow
async def test_a_frontend_stands_still(stage: RealStage) -> None:
    async with stage.drill("A frontend stands still (SIGSTOP)", cuts=True) as grove:
        await _ends(grove.workers[1], "frontend", by=signal.SIGSTOP)


@pytest.mark.slow
async def test_a_machine_is_suspended(stage: RealStage) -> None:
    async with stage.drill("A worker is suspended and goes on") as grove:
        part = grove.workers[2]
        before = part.memory().keys()
        part.signal(signal.SIGSTOP)
        await asyncio.sleep(FAULT)
        part.signal(signal.SIGCONT)
    assert part.memory().keys() == before, "the same processes serve on"


@pytest.mark.slow
async def test_a_worker_is_replaced(stage: RealStage) -> None:
    async with stage.drill("A worker is replaced (SIGTERM)") as grove:
        part = grove.workers[0]
        await part.end()
        part.held = False


@pytest.mark.slow
async def test_redis_dies_and_comes_back_empty(stage: RealStage) -> None:
    async with stage.drill("Redis is killed and comes back empty") as grove:
        grove.redis.kill()
        await asyncio.sleep(FAULT)
        grove.redis.start()


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_redis_refuses_writes(stage: RealStage, refusal: str) -> None:
    async with stage.drill(f"Redis refuses writes ({refusal})") as grove:
        REFUSALS[refusal](grove.redis.client)
        await asyncio.sleep(FAULT)
        well(grove.redis.client)


@pytest.mark.slow
async def test_the_wall_clock_is_set(stage: RealStage) -> None:
    async with stage.drill("The wall clock goes an hour forward, then back"):
        for seconds in (3600, -3600, 0):
            stage.shift_wall_clock(seconds)
            await asyncio.sleep(FAULT)


@pytest.mark.slow
async def test_nothing_reads_standard_error(stage: RealStage) -> None:
    """Of a router and a worker that have filled the pipe."""
    async with stage.drill("Nothing reads what a router and a worker write") as grove:
        parts = [grove.routers[1], grove.workers[2]]
        for part in parts:
            await part.end()
            part.read, part.arguments = False, [*part.arguments, "--log-level", "debug"]
            part.start()
        await eventually(grove.healthy, deadline=HEALTHY_WITHIN, what="both parts")
        for _ in range(20):
            asked = (ask(grove.session, parts[0].url, _request(number)) for number in range(30))
            assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        for part in parts:
            await part.end()
            part.read, part.arguments = True, part.arguments[:-2]
            part.held = False


@pytest.mark.slow
async def test_values_of_a_request_overflow(stage: RealStage) -> None:
    async with stage.drill("Some requests compute what is no number") as grove:
        for _ in range(8):
            bodies = [_request(number) for number in range(6)]
            bodies = [body | {"prompt": body["prompt"] + POISON} for body in bodies]
            asked = (ask(grove.session, grove.routers[0].url, body) for body in bodies)
            assert {answer.status for answer in await asyncio.gather(*asked)} == {500}


@pytest.mark.slow
async def test_an_agent_stands_still(stage: RealStage) -> None:
    """What publishes the lease and watches the others; these serve on."""
    async with stage.drill("An agent stands still (SIGSTOP)") as grove:
        part = grove.workers[1]
        before = part.memory().keys()
        part.signal(signal.SIGSTOP, "")
        await asyncio.sleep(2 * FAULT)
        part.signal(signal.SIGCONT, "")
    assert part.memory().keys() == before, "the same processes serve on"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of a few megabytes."""
    # Below /tmp: paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", name]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        yield Path(name)
        subprocess.run(["umount", "--lazy", name], check=True)


@pytest.mark.slow
async def test_the_disk_of_temporary_files_is_full(stage: RealStage, small_disk: Path) -> None:
    async with stage.drill("The disk of temporary files is full") as grove:
        parts = [grove.routers[1], grove.workers[2]]
        for part in parts:
            await part.end()
            part.environment |= {"TMPDIR": str(small_disk)}
            part.start()
        parts[0].held = parts[1].held = False
        await eventually(grove.healthy, deadline=HEALTHY_WITHIN, what="both parts")
        before = [part.memory().keys() for part in parts]
        _fill(small_disk / "full")
        for _ in range(3):  # of every kind: what is counted for the first time takes room
            for number in range(8):
                kinds = [{"stream": True}, {"n": 2}, {"logprobs": 2}, {"max_tokens": 0}, {"n": 0}]
                kinds += [{"structured_outputs": {"regex": "[a-z]{3,8}"}}, {"model": "none"}]
                bodies = [_request(number) | kind for kind in kinds]
                await asyncio.gather(*(ask(grove.session, parts[0].url, body) for body in bodies))
                await asyncio.gather(*(ask(grove.session, parts[1].url, body) for body in bodies))
        for part in parts:
            assert (await grove.get(f"{part.url}/metrics"))[0] == 200
        assert [part.memory().keys() for part in parts] == before, "the same processes serve on"
        (small_disk / "full").unlink()
        for part in parts:
            await part.end()
            del part.environment["TMPDIR"]
            part.held = False


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as full:
        for size in (1 << 16, 1 << 9, 1):
            with contextlib.suppress(OSError):
                while True:
                    full.write(bytes(size))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["worker", "router"])
async def test_odd_requests_come(stage: RealStage, kind: str) -> None:
    async with stage.drill(f"Odd requests come to a {kind}") as grove:
        part = grove.workers[0] if kind == "worker" else grove.routers[0]
        before, wrong = part.memory().keys(), {}
        for oddity, (data, right) in odd_requests(MODEL).items():
            statuses = await send(part.port, data)
            if len(statuses) != 1 or statuses[0] not in right:
                wrong[oddity] = statuses
        assert not wrong
        assert part.memory().keys() == before, "the same processes serve on"
    assert "Traceback" not in (part.directory / f"{part.name}.log").read_text()


@pytest.mark.slow
async def test_clients_do_not_read(stage: RealStage) -> None:
    async with stage.drill("Clients do not read their streams") as grove:
        body = {
            **_request(0),
            **{"stream": True, "n": 8, "logprobs": 5, "max_tokens": 150, "ignore_eos": True},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        writers = []
        for router in grove.routers * 2:
            _, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            writers.append(writer)
        await asyncio.sleep(2 * FAULT)
        for writer in writers:
            writer.close()
