"""Faults at random times before real workers, for as long as one likes.

    python -m tests.drills.soak --minutes 60 --seed 1

Two routers, three workers of a small random model with tiny pools and a host tier, and a Redis,
each started anew when it ends, as Kubernetes would. Afterwards no text may differ from that of an
undisturbed worker without a cache, no answer may stop as if it were whole, pages and keys are where
they were, and processes that lived throughout have not grown. Exit status 0 when all of it held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import environment, record
from tests.drills.grove import (
    HEALTHY_WITHIN,
    MODEL,
    ROUTER,
    WORKERS,
    Grove,
    Part,
    growing,
    undisturbed,
    write_model,
)
from tests.drills.load import End, Load, Sample, ask, differ
from tests.drills.trend import Trend, trend
from tests.redis_faults import REFUSALS, well
from tests.router.harness import eventually

RATE = 4.0  # requests a second
KNOWN = 300  # requests that come again and again; their texts are asked for before the faults
FRESH_EVERY = 20  # one that was never sent before; its text is asked for after the faults
SETTLED = 15 * 60.0  # seconds after which memory may not grow
MEMORY_EVERY = 5.0  # seconds
SEEN = 3.0  # seconds after which routers know that a part is gone
TOGETHER = "together"

# ---- requests --------------------------------------------------------------------------------


def draw_request(random_: random.Random, themes: Sequence[str]) -> dict[str, Any]:
    """A completion or a chat whose beginning others share; greedy, or sampled with a seed."""
    theme = random_.choice(themes)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": random_.randint(4, 48)}
    if random_.random() < 0.5:
        body["prompt"] = theme[: random_.randint(40, len(theme))] + _words(random_, 4)
    else:
        turns = [theme[:90], *(_words(random_, 3) for _ in range(2 * random_.randint(0, 2)))]
        body["messages"] = [
            {"role": ("user", "assistant")[number % 2], "content": text}
            for number, text in enumerate(turns)
        ]
    body |= {"temperature": 0} if random_.random() < 0.6 else {"seed": random_.randrange(1 << 30)}
    if random_.random() < 0.1:
        body["n"] = 2
    if random_.random() < 0.1:
        body["structured_outputs"] = {"regex": "[a-z]{3,12}( [0-9]{2,6})+"}
    return body


def _words(random_: random.Random, count: int) -> str:
    letters = "etaoinshrdlu"
    return " ".join(
        "".join(random_.choices(letters, k=random_.randint(2, 6))) for _ in range(count)
    )


class Requests:
    """All that are sent, by number: the same of the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        random_ = random.Random(seed)
        self._themes = [_words(random_, 30)[:120] for _ in range(12)]
        self.known = [draw_request(random_, self._themes) for _ in range(KNOWN)]
        self.texts: list[tuple[str, ...]] = []  # of those known

    @staticmethod
    def is_fresh(number: int) -> bool:
        return number % FRESH_EVERY == 0

    def _which(self, number: int) -> int:
        return random.Random(f"{self._seed} {number}").randrange(KNOWN)

    def body(self, number: int) -> dict[str, Any]:
        if self.is_fresh(number):
            return draw_request(random.Random(f"{self._seed} fresh {number}"), self._themes)
        return self.known[self._which(number)]

    def expected(self, number: int) -> tuple[str, ...] | None:
        return None if self.is_fresh(number) else self.texts[self._which(number)]


# ---- faults ----------------------------------------------------------------------------------


async def _for_a_while(random_: random.Random, most: float = 10.0) -> None:
    await asyncio.sleep(random_.uniform(1.0, most))


def _mortal(grove: Grove, random_: random.Random) -> Part:
    """A worker that may be killed: the last one lives throughout."""
    return random_.choice(grove.workers[:-1])


async def redis_dies(grove: Grove, random_: random.Random) -> None:
    grove.redis.kill()
    await _for_a_while(random_)
    grove.redis.start()


async def redis_stands_still(grove: Grove, random_: random.Random) -> None:
    grove.redis.process.send_signal(signal.SIGSTOP)
    await _for_a_while(random_)
    grove.redis.process.send_signal(signal.SIGCONT)


async def redis_refuses(grove: Grove, random_: random.Random) -> None:
    grove.second_redis.client.execute_command("REPLICAOF", "NO", "ONE")
    client = grove.redis.client
    REFUSALS[random_.choice(sorted(REFUSALS))](client)
    await _for_a_while(random_)
    well(client)
    client.config_set("save", "")
    client.config_set("dir", str(grove.redis.directory))
    client.config_set("stop-writes-on-bgsave-error", "yes")


async def redis_is_far(grove: Grove, random_: random.Random) -> None:
    grove.redis_route.delay = random_.uniform(0.02, 0.8)
    await _for_a_while(random_)
    grove.redis_route.delay = 0.0


async def redis_fails_over(grove: Grove, random_: random.Random) -> None:
    """The old one takes no more writes, and connections to it stay open."""
    old, new = grove.redis, grove.second_redis
    new.client.execute_command("REPLICAOF", "127.0.0.1", old.port)
    await eventually(
        lambda: new.client.info("replication").get("master_link_status") == "up",
        what="the copy of Redis",
    )
    new.client.execute_command("REPLICAOF", "NO", "ONE")
    grove.redis_route.target = new.port
    old.client.execute_command("REPLICAOF", "127.0.0.1", new.port)
    grove.redis, grove.second_redis = new, old


async def a_key_is_of_the_wrong_type(grove: Grove, random_: random.Random) -> None:
    grove.redis.client.sadd("radixgrove:services", "other")
    grove.redis.client.set("radixgrove:{other}:replicas", "no hash")
    await _for_a_while(random_)
    grove.redis.client.delete("radixgrove:{other}:replicas")


async def an_engine_dies(grove: Grove, random_: random.Random) -> None:
    _mortal(grove, random_).signal(signal.SIGKILL, "engine")


async def an_engine_stands_still(grove: Grove, random_: random.Random) -> None:
    """Until its agent sees it, or for less."""
    part = _mortal(grove, random_)
    part.signal(signal.SIGSTOP, "engine")
    await _for_a_while(random_, 20.0)
    part.signal(signal.SIGCONT, "engine")


async def a_frontend_dies(grove: Grove, random_: random.Random) -> None:
    _mortal(grove, random_).signal(signal.SIGKILL, "frontend")


async def a_worker_dies(grove: Grove, random_: random.Random) -> None:
    part = _mortal(grove, random_)
    part.held = True
    part.signal(signal.SIGKILL)
    await _for_a_while(random_)
    part.held = False


async def a_worker_is_suspended(grove: Grove, random_: random.Random) -> None:
    part = random_.choice(grove.workers)
    part.signal(signal.SIGSTOP)
    await _for_a_while(random_, 15.0)
    part.signal(signal.SIGCONT)


async def a_worker_is_replaced(grove: Grove, random_: random.Random) -> None:
    part = _mortal(grove, random_)
    await part.end()
    part.held = False


async def a_router_dies(grove: Grove, random_: random.Random) -> None:
    part = grove.routers[1]
    part.held = True
    part.signal(signal.SIGKILL)
    await _for_a_while(random_)
    part.held = False


async def a_router_is_replaced(grove: Grove, random_: random.Random) -> None:
    part = grove.routers[1]
    await part.end()
    part.held = False


async def a_router_stands_still(grove: Grove, random_: random.Random) -> None:
    part = random_.choice(grove.routers)
    part.signal(signal.SIGSTOP)
    await _for_a_while(random_)
    part.signal(signal.SIGCONT)


async def long_prompts_come(grove: Grove, random_: random.Random) -> None:
    body = {"model": MODEL, "prompt": "word " * 1_600_000}
    asked = (ask(grove.session, grove.routers[0].url, body) for _ in range(2))
    statuses = {answer.status for answer in await asyncio.gather(*asked)}
    assert statuses == {400}, statuses


async def clients_leave(grove: Grove, random_: random.Random) -> None:
    """Forty streams at once, each left at a time of its own."""
    themes = [_words(random_, 20)[:100] for _ in range(3)]

    async def leave() -> None:
        body = draw_request(random_, themes) | {"stream": True, "max_tokens": 100}
        asking = ask(grove.session, grove.routers[0].url, body)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asking, random_.uniform(0.01, 2.0))

    await asyncio.gather(*(leave() for _ in range(40)))


Fault = Callable[[Grove, random.Random], Awaitable[None]]
# Those of one line never happen at the same time.
FAULTS: list[list[Fault]] = [
    [
        *(redis_dies, redis_stands_still, redis_refuses, redis_is_far),
        *(redis_fails_over, a_key_is_of_the_wrong_type),
    ],
    [
        *(an_engine_dies, an_engine_stands_still, a_frontend_dies),
        *(a_worker_dies, a_worker_is_suspended, a_worker_is_replaced),
    ],
    [a_router_dies, a_router_is_replaced, a_router_stands_still],
    [long_prompts_come, clients_leave],
]


@dataclass
class Damage:
    """A fault, or two, and the seconds from their end until all was healthy."""

    names: tuple[str, ...]
    healthy_after: float


async def strike(grove: Grove, random_: random.Random, until: float, damages: list[Damage]) -> None:
    """One or two faults at a time, at random times, until then; what each did is added.

    Raises:
        AssertionError: all was not healthy in time.
    """
    while time.monotonic() < until:
        await _for_a_while(random_, 8.0)
        lines = random_.sample(FAULTS, random_.choice((1, 1, 2)))
        faults = [random_.choice(line) for line in lines]
        names = tuple(fault.__name__ for fault in faults)
        _say(" and ".join(names))
        await asyncio.gather(*(fault(grove, random_) for fault in faults))
        ended = time.monotonic()
        await asyncio.sleep(SEEN)
        what = f"health after {' and '.join(names)}"
        await eventually(grove.healthy, deadline=HEALTHY_WITHIN, what=what)
        damages.append(Damage(names, time.monotonic() - ended))
        _say(f"healthy after {damages[-1].healthy_after:.1f} s")


# ---- what must have held ---------------------------------------------------------------------


class Memory:
    """Resident MiB of every process, by what it is, as long as the first of its kind lives."""

    def __init__(self, grove: Grove) -> None:
        self._grove = grove
        self._began = time.monotonic()
        self._first: dict[str, psutil.Process] = {}
        self._measured: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            at = time.monotonic() - self._began
            for part in self._grove.parts:
                for name, process in part.processes().items():
                    self._measure(f"{part.name} {name}".strip(), process, at)
            await asyncio.sleep(MEMORY_EVERY)

    def _measure(self, name: str, process: psutil.Process, at: float) -> None:
        first = self._first.setdefault(name, process)
        with contextlib.suppress(psutil.Error):
            if process.pid == first.pid:
                self._measured[name].append((at, process.memory_info().rss / 2**20))

    def trends(self, settled: float) -> dict[str, Trend]:
        """MiB an hour from then on, of each process that still lives, and of all of them."""
        settled_points = {
            name: {at: mib for at, mib in self._measured[name] if at >= settled}
            for name, process in self._first.items()
            if process.is_running()
        }
        common = sorted(set.intersection(*map(set, settled_points.values())))
        series = {
            name: [(at, points[at]) for at in common] for name, points in settled_points.items()
        }
        total = [(at, sum(points[at] for points in settled_points.values())) for at in common]
        return {name: trend(points) for name, points in (series | {TOGETHER: total}).items()}


async def rest(grove: Grove) -> list[str]:
    """Waits until nothing runs, and empties the pools; what they hold that they should not."""
    await eventually(grove.idle, deadline=60, what="an idle grove")
    wrong = []
    for part in grove.workers:
        pages = await grove.pages(part)
        if pages.free + pages.cached != pages.total:
            wrong.append(f"pages of {part.name} are lost: {pages}")
        url = f"http://127.0.0.1:{part.management_port}/flush-cache"
        async with grove.session.post(url, json={}) as response:
            assert response.status == 202, response.status
        try:
            await eventually(lambda part=part: _empty(grove, part), deadline=20, what="emptiness")
        except AssertionError:
            wrong.append(f"pages of {part.name} stay: {await grove.pages(part)}")
    return wrong


async def _empty(grove: Grove, part: Part) -> bool:
    pages = await grove.pages(part)
    return pages.free == pages.total and pages.host_used == 0


async def keys_become(grove: Grove, expected: Counter[str], when: str) -> list[str]:
    """What is there too much, or too little, after a minute."""
    with contextlib.suppress(AssertionError):
        await eventually(lambda: grove.keys() == expected, deadline=60, what="the keys")
        return []
    now = grove.keys()
    return [f"keys {when}: {dict(now - expected)} too many, {dict(expected - now)} missing"]


# ---- the soak --------------------------------------------------------------------------------


@dataclass
class Outcome:
    samples: list[Sample]
    damages: list[Damage]
    trends: dict[str, Trend]
    wrong: list[str]  # everything that should not be, in words

    @property
    def held(self) -> bool:
        return not self.wrong

    def count(self, end: End) -> int:
        return sum(sample.end is end for sample in self.samples)


async def soak(directory: Path, minutes: float, seed: int) -> Outcome:
    (directory / "model").mkdir()
    write_model(directory / "model")
    requests = Requests(seed)
    async with growing(directory) as grove:
        requests.texts = await undisturbed(directory, requests.known, grove.session)
        _say(f"the texts of {KNOWN} requests are known")
        outcome = await _soaked(grove, requests, minutes, seed)
        fresh = [sample for sample in outcome.samples if requests.is_fresh(sample.number)]
        fresh = [sample for sample in fresh if sample.end in (End.WHOLE, End.CUT)]
        bodies = [requests.body(sample.number) for sample in fresh]
        for sample, texts in zip(
            fresh, await undisturbed(directory, bodies, grove.session), strict=True
        ):
            if differ(sample.end, sample.texts, texts):
                outcome.wrong.append(f"request {sample.number}: {sample.texts}, not {texts}")
    return outcome


async def _soaked(grove: Grove, requests: Requests, minutes: float, seed: int) -> Outcome:
    for part in grove.routers:
        part.start()
    await eventually(lambda: grove.keys()[ROUTER] == 2, deadline=300, what="the routers' keys")
    bare = grove.keys()
    for part in grove.workers:
        part.start()
    await eventually(grove.healthy, deadline=HEALTHY_WITHIN, what="the grove")
    urls = [part.url for part in grove.routers]
    warm = Load(urls, requests.body, RATE, expected=requests.expected)
    async with warm:
        await eventually(lambda: len(warm.samples) >= 40, deadline=120, what="the first answers")
    wrong = await rest(grove)
    await asyncio.sleep(30.0)  # sets of an emptied pool, and what was reserved, go meanwhile
    full = grove.keys()

    wrong += [f"before the faults: {s}" for s in warm.samples if s.end is not End.WHOLE]
    memory = Memory(grove)
    tasks = [asyncio.create_task(grove.keep()), asyncio.create_task(memory.watch())]
    _say("faults begin")
    load = Load(urls, requests.body, RATE, timeout=150.0, expected=requests.expected)
    damages: list[Damage] = []
    async with load:
        try:
            await strike(grove, random.Random(seed), time.monotonic() + 60 * minutes, damages)
        except AssertionError as error:
            wrong.append(str(error))
    _say("faults end")
    trends = memory.trends(min(SETTLED, 30 * minutes))
    wrong += [
        f"request {sample.number} ended {sample.end.value}: {sample.texts} {sample.seen}"
        for sample in load.samples
        if sample.end in (End.WRONG, End.TRUNCATED)
    ]
    if not trends[TOGETHER].flat:
        wrong.append(f"memory grows or shrinks: {trends[TOGETHER]}")
    wrong += await rest(grove)
    wrong += await keys_become(grove, full, "with workers at rest")
    for part in grove.workers:
        await part.end()
    wrong += await keys_become(grove, bare, "without workers")
    for task in tasks:
        task.cancel()
    for part in grove.routers:
        await part.end()
    wrong += await keys_become(grove, Counter(), "without routers")
    return Outcome(load.samples, damages, trends, wrong)


def keep_figures(outcome: Outcome, minutes: float, seed: int) -> None:
    kinds = Counter(name for damage in outcome.damages for name in damage.names)
    after = sorted(damage.healthy_after for damage in outcome.damages)
    record(
        {
            "benchmark": "soak",
            "workload": f"{minutes:.0f} minutes of faults, seed {seed}",
            "model": "random Llama of 3 layers",
            "subject": f"two routers, {WORKERS} workers",
            "metric": "findings",
            "value": len(outcome.wrong),
            "unit": "findings",
            "findings": [finding[:300] for finding in outcome.wrong],
            "requests": {end.value: outcome.count(end) for end in End},
            "faults": dict(sorted(kinds.items())),
            "healthy_after_s": {
                "median": round(after[len(after) // 2], 1),
                "longest": round(after[-1], 1),
            },
            "memory_mib_an_hour": {
                name: [round(x, 2) for x in (trend.low, trend.slope, trend.high)]
                for name, trend in outcome.trends.items()
            },
        }
    )


def _say(text: str) -> None:
    print(time.strftime("%T"), text, flush=True)


async def _run(directory: Path, minutes: float, seed: int) -> Outcome:
    """SIGTERM ends it, with all that it started."""
    task = asyncio.create_task(soak(directory, minutes, seed))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="a new directory for logs, which stays")
    arguments = parser.parse_args()
    environment()  # the commit that runs, whatever is committed meanwhile
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        directory = arguments.logs or Path(temporary)
        directory.mkdir(exist_ok=True)
        outcome = asyncio.run(_run(directory, arguments.minutes, arguments.seed))
    keep_figures(outcome, arguments.minutes, arguments.seed)
    for sample in outcome.samples:
        if sample.end in (End.FAILED, End.LOST):
            print(f"{sample.end.value} {sample.number}: {sample.seen[:300]}")
    print({end.value: outcome.count(end) for end in End})
    print(*outcome.trends.items(), *outcome.wrong, sep="\n")
    return 0 if outcome.held else 1


if __name__ == "__main__":
    sys.exit(main())
