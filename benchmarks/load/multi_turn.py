"""Many conversations on a worker with room for a part of them: what a host tier is for.

    python -m benchmarks.load.multi_turn --model llama-3.1-8b --host-gib 74.5 0

Clients take turns over HTTP, `--in-flight` at a time: each sends its whole history and new tokens,
and keeps the tokens it gets (`workloads.MultiTurn`). Latencies and the hit share are those after
the first round, the wall time is of all.

With a tier, then one request at a time: prompts with a long prefix are computed, sent again with
the prefix on the GPU, and a third time after other prefixes took its place there, so that it comes
from the host; the engine's counter of loaded pages must say so. An answer is one token, its end the
time to it.

Each of `--host-gib` is a worker of its own, 0 one without a tier; `--small` is a try without a GPU.
What follows `--` goes to the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import results
from benchmarks.engine.workloads import MultiTurn
from benchmarks.load.worker_process import Worker, find_config, running_worker, write_model
from radixgrove.cli.bench.report import percentile, time_per_token
from radixgrove.cli.bench.sender import Sample, open_session, send

FRONTENDS = 1  # so few streams need no more
REQUEST_SECONDS = 120.0
TAIL_TOKENS = 32  # behind a prefix, different each time
LOADED_PAGES = "radixgrove_engine_loaded_pages_total"
COUNTERS = {  # of the engine, kept with a run
    "host_cached_tokens": "radixgrove_engine_host_cached_tokens_total",
    "saved_pages": "radixgrove_engine_saved_pages_total",
    "loaded_pages": LOADED_PAGES,
    "preemptions": "radixgrove_engine_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run on one worker."""

    conversations: MultiTurn
    in_flight: int
    kv_tokens: int  # of the GPU's pool: about a quarter of what the conversations come to
    prefix_tokens: int  # whole pages; 0: conversations only

    @property
    def max_model_len(self) -> int:
        history = self.conversations.history_tokens(self.conversations.rounds)
        return max(history, self.prefix_tokens + TAIL_TOKENS + 1)


FULL = Plan(MultiTurn(), in_flight=16, kv_tokens=139_264, prefix_tokens=32_768)
SMALL = Plan(
    MultiTurn(clients=6, rounds=3, new_tokens=96, output_tokens=8),
    in_flight=2,
    kv_tokens=768,
    prefix_tokens=256,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    session: aiohttp.ClientSession
    url: str
    model: str

    async def complete(
        self, token_ids: list[int], max_tokens: int, *, sent: float = 0.0, with_ids: bool = False
    ) -> Sample:
        """
        Raises:
            RuntimeError: the request failed, or got fewer tokens than it asked for.
        """
        body = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": with_ids,
        }
        sample = Sample(sent=sent, late=0.0)
        await send(self.session, f"{self.url}/v1/completions", msgspec.json.encode(body), sample)
        if sample.error is not None or sample.output_tokens != max_tokens:
            reason = sample.error or f"{sample.output_tokens} tokens instead of {max_tokens}"
            raise RuntimeError(f"a request of {len(token_ids)} tokens failed: {reason}")
        return sample


# ---- conversations ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What the clients saw; `ttft` in seconds, ascending, and all but `wall` after round one."""

    ttft: list[float]
    per_later_token: float  # seconds, the mean of the requests' means
    hit_share: float
    wall: float  # seconds from the first request to the last token

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Sample]]) -> Summary:
        """Of at least two rounds of samples that have no errors."""
        later = [sample for samples in rounds[1:] for sample in samples]
        every = [sample for samples in rounds for sample in samples]
        return cls(
            ttft=sorted(sample.first for sample in later if sample.first is not None),
            per_later_token=statistics.fmean(
                seconds for sample in later if (seconds := time_per_token(sample)) is not None
            ),
            hit_share=sum(s.cached_tokens for s in later) / sum(s.prompt_tokens for s in later),
            wall=max(s.sent + s.total for s in every) - min(s.sent for s in every),
        )


async def converse(
    endpoint: Endpoint, workload: MultiTurn, in_flight: int, vocab_size: int
) -> list[list[Sample]]:
    """Every turn, in order, at most `in_flight` at once: the samples of each round.

    Raises:
        RuntimeError: a request failed.
    """
    messages = workload.messages()
    histories: list[list[int]] = [[] for _ in range(workload.clients)]
    # A client's next turn waits for its last one, should others have been that much faster.
    speaking = [asyncio.Lock() for _ in range(workload.clients)]
    samples: list[list[Sample]] = [[] for _ in range(workload.rounds)]
    turns = workload.turns()
    begin = time.perf_counter()

    async def take_turns() -> None:
        for number, client in turns:
            async with speaking[client]:
                history = histories[client]
                history += [token % vocab_size for token in messages[client][number]]
                sent = time.perf_counter() - begin
                sample = await endpoint.complete(
                    history, workload.output_tokens, sent=sent, with_ids=True
                )
                history += sample.token_ids
                samples[number].append(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(take_turns())
    return samples


# ---- one long prefix -------------------------------------------------------------------------


def prefix_count(prefix_tokens: int, kv_tokens: int) -> int:
    """So many that, in turn, each is gone from the GPU before it comes again."""
    return -(-kv_tokens // prefix_tokens) + 1


@dataclass(slots=True)
class Visits:
    """Requests with a prefix that was, or should have been, in one place."""

    place: str
    cached_tokens: int  # each should have found
    loaded_pages: int  # they should have brought back from the host together
    samples: list[Sample] = field(default_factory=list)
    loaded: int = 0  # pages that did come from the host meanwhile

    async def add(self, endpoint: Endpoint, token_ids: list[int]) -> None:
        self.samples.append(await endpoint.complete(token_ids, 1))

    @property
    def ttft(self) -> float:
        """Seconds, the median."""
        return statistics.median(sample.total for sample in self.samples)

    @property
    def cached(self) -> int:
        return min(sample.cached_tokens for sample in self.samples)

    @property
    def misplaced(self) -> bool:
        found = {sample.cached_tokens for sample in self.samples}
        return found != {self.cached_tokens} or self.loaded < self.loaded_pages


async def visit_prefixes(endpoint: Endpoint, worker: Worker, plan: Plan) -> list[Visits]:
    """One request at a time, on an empty cache.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(1)
    info = worker.engine_info()
    tokens, count = plan.prefix_tokens, prefix_count(plan.prefix_tokens, plan.kv_tokens)

    def draw(number: int) -> list[int]:
        return [rng.randrange(info["vocab_size"]) for _ in range(number)]

    prefixes = [draw(tokens) for _ in range(count)]
    computed = Visits("recomputed", 0, 0)
    near = Visits("on the GPU", tokens, 0)
    far = Visits("from the host", tokens, count * tokens // info["page_size"])
    for prefix in prefixes:
        await computed.add(endpoint, prefix + draw(TAIL_TOKENS))
        await near.add(endpoint, prefix + draw(TAIL_TOKENS))
    before = worker.usage()
    for prefix in prefixes:
        await far.add(endpoint, prefix + draw(TAIL_TOKENS))
    far.loaded = round(worker.usage().since(before).counters[LOADED_PAGES])
    return [computed, near, far]


# ---- the report ------------------------------------------------------------------------------


def conversation_row(plan: Plan, summary: Summary, counters: dict[str, float]) -> dict[str, Any]:
    workload = plan.conversations
    milliseconds = [seconds * 1e3 for seconds in summary.ttft]
    return {
        "workload": f"multi_turn_{workload.clients}x{workload.rounds}",
        "in_flight": plan.in_flight,
        "new_tokens": workload.new_tokens,
        "output_tokens": workload.output_tokens,
        "metric": "ttft mean",
        "value": round(statistics.fmean(milliseconds), 1),
        "unit": "ms",
        "ttft_p50_ms": round(percentile(milliseconds, 50), 1),
        "ttft_p99_ms": round(percentile(milliseconds, 99), 1),
        "wall_s": round(summary.wall, 2),
        "hit_share": round(summary.hit_share, 4),
        "later_token_ms": round(summary.per_later_token * 1e3, 2),
        **{name: round(counters[metric]) for name, metric in COUNTERS.items()},
    }


def show(row: dict[str, Any], workload: MultiTurn) -> str:
    engine = ", ".join(f"{row[name]:,} {name.replace('_', ' ')}" for name in COUNTERS)
    return (
        f"  {row['workload']}: TTFT mean {row['value']:,.0f}, p50 {row['ttft_p50_ms']:,.0f}, "
        f"p99 {row['ttft_p99_ms']:,.0f} ms; wall {row['wall_s']:.1f} s; hit share "
        f"{row['hit_share']:.3f} of {workload.best_hit_share:.4f}; "
        f"{row['later_token_ms']:.1f} ms a later token\n    engine: {engine}"
    )


def visits_row(plan: Plan, visits: Visits) -> dict[str, Any]:
    return {
        "workload": f"prefix_{plan.prefix_tokens}",
        "metric": f"ttft {visits.place}",
        "value": round(visits.ttft * 1e3, 1),
        "unit": "ms",
        "runs": [round(sample.total * 1e3, 1) for sample in visits.samples],
        "cached_tokens": visits.cached,
        "loaded_pages": visits.loaded,
    }


def show_visits(row: dict[str, Any]) -> str:
    return (
        f"  {row['workload']}: {row['metric']} {row['value']:,.1f} ms, median of "
        f"{len(row['runs'])}; {row['cached_tokens']:,} tokens cached, "
        f"{row['loaded_pages']:,} pages loaded"
    )


async def measure_conversations(
    worker: Worker, name: str, plan: Plan
) -> tuple[Summary, dict[str, float]]:
    """What the clients saw, and the engine's counters over all of it."""
    workload = plan.conversations
    vocab_size = worker.engine_info()["vocab_size"]
    before = worker.usage()
    async with open_session(REQUEST_SECONDS) as session:
        endpoint = Endpoint(session, worker.url, name)
        rounds = await converse(endpoint, workload, plan.in_flight, vocab_size)
    sent = sum(sample.prompt_tokens for samples in rounds for sample in samples)
    if sent != workload.prompt_tokens:
        raise RuntimeError(f"{sent} prompt tokens instead of {workload.prompt_tokens}")
    return Summary.of(rounds), worker.usage().since(before).counters


async def measure_prefix(worker: Worker, name: str, plan: Plan) -> list[Visits]:
    worker.flush_cache()
    async with open_session(REQUEST_SECONDS) as session:
        return await visit_prefixes(Endpoint(session, worker.url, name), worker, plan)


def measure(
    name: str, config_dir: Path, plan: Plan, host_gib: float, arguments: argparse.Namespace
) -> None:
    """All of a plan on one worker.

    Raises:
        RuntimeError: the worker or a request failed, or a prefix was not where it should have been.
    """
    mode = "no host tier"
    options = ["--kv-tokens", str(plan.kv_tokens), *arguments.worker_options]
    if host_gib:
        mode = f"host tier of {host_gib:g} GiB, {arguments.write_policy}"
        options += ["--host-cache-gib", str(host_gib)]
        options += ["--host-write-policy", arguments.write_policy]
    with tempfile.TemporaryDirectory(prefix="radixgrove-multi-turn-") as scratch:
        model_dir = Path(scratch)
        write_model(config_dir, model_dir)
        with running_worker(
            model_dir, name, frontends=FRONTENDS, max_model_len=plan.max_model_len, options=options
        ) as worker:
            common = {
                "benchmark": "multi_turn",
                "model": name,
                "subject": "radixgrove",
                "device": worker.engine_info()["device"],
                "host_gib": host_gib,
                "write_policy": arguments.write_policy if host_gib else None,
                "kv_tokens": plan.kv_tokens,
                "start_seconds": round(worker.start_seconds, 1),
                "label": arguments.label,
            }
            print(f"{name}, {mode}: ready after {worker.start_seconds:.1f} s", flush=True)
            found = asyncio.run(measure_conversations(worker, name, plan))
            row = {**common, **conversation_row(plan, *found)}
            results.record(row)
            print(show(row, plan.conversations), flush=True)
            if not (host_gib and plan.prefix_tokens):
                return
            places = asyncio.run(measure_prefix(worker, name, plan))
            for visits in places:
                row = {**common, **visits_row(plan, visits)}
                results.record(row)
                print(show_visits(row), flush=True)
            if misplaced := [visits.place for visits in places if visits.misplaced]:
                raise RuntimeError(f"not all prefixes were {' and '.join(misplaced)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--host-gib", nargs="+", type=float, default=[74.5, 0.0], help="sizes of the host tier"
    )
    parser.add_argument(
        "--write-policy",
        default="write-through",
        choices=("write-through", "write-through-selective", "write-back"),
    )
    parser.add_argument("--small", action="store_true", help="other defaults of what follows")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, help="at least 2")
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--prefix-tokens", type=int, help="0: conversations only")
    parser.add_argument("--label", default="", help="kept in the record, to tell variants apart")
    parser.add_argument("worker_options", nargs="*", help="after --: options of the workers")
    arguments = parser.parse_args(argv)
    plan = SMALL if arguments.small else FULL
    conversations = replace(plan.conversations, **_given(arguments, "clients", "rounds"))
    changes = _given(arguments, "in_flight", "kv_tokens", "prefix_tokens")
    plan = replace(plan, conversations=conversations, **changes)
    for host_gib in arguments.host_gib:
        measure(*find_config(arguments.model), plan, host_gib, arguments)
    return 0


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, int]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
