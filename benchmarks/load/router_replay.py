"""Open-loop replay of a request trace through routers before simulated replicas.

Each hash id of the trace is a text of one block, 64 characters or 16 tokens, or of as many as
`--id-tokens` says: 512 make prompts as long as those that were traced. Replicas cache blocks (LRU),
prefill first in first out at a set cost a block, and count their own hits, alike for every router.
Requests are sent at a fixed rate, whatever comes back.

    python -m benchmarks.load.router_replay --trace TRACE.jsonl [--peers-venv VENV]
        [--subjects radixgrove,smg] [--requests 4000] [--rate 120] [--replicas 4] [--dp 2]
        [--id-tokens 512 --capacity 320000 --block-ms 0.25 --rate 15]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from benchmarks import results
from benchmarks.load.http_load import Pool, percentile
from benchmarks.load.subjects import (
    available_peers,
    process,
    redis_server,
    router,
    table,
    wait_for_http,
)
from benchmarks.simulated import MODEL, block_text
from radixgrove.cli.redis_server import free_port

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    ttft: list[float]
    failures: int
    imbalance: float  # most loaded replica's prefilled blocks over the mean
    cpu: float  # seconds of the router


def load_trace(path: Path, limit: int, blocks: int = 1) -> list[list[int]]:
    """Block ids of the first `limit` requests, so many `blocks` a hash id."""
    with path.open() as file:
        lines = [json.loads(line)["hash_ids"] for line, _ in zip(file, range(limit), strict=False)]
    return [[name * blocks + i for name in line for i in range(blocks)] for line in lines]


def request_body(blocks: list[int]) -> bytes:
    prompt = "".join(map(block_text, blocks))
    return msgspec.json.encode({"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": 2})


async def replay(port: int, trace: list[list[int]], rate: float) -> tuple[list[float], int]:
    """Times to the first token, and how many requests failed."""
    pool = Pool(port)
    ttft: list[float] = []
    failures = 0

    async def one(body: bytes) -> None:
        nonlocal failures
        try:
            reply = await pool.post("/v1/completions", body)
        except (OSError, TimeoutError):
            failures += 1
            return
        if reply.status == 200 and b"[DONE]" in reply.body:
            ttft.append(reply.first_byte)
        else:
            failures += 1

    start = time.perf_counter()
    running = set()
    for number, blocks in enumerate(trace):
        body = request_body(blocks)
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        task = asyncio.create_task(one(body))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    pool.close()
    return ttft, failures


def measure(subject: str, trace: list[list[int]], options: argparse.Namespace) -> Outcome:
    with contextlib.ExitStack() as stack:
        redis_url = None
        if subject.startswith("radixgrove"):
            redis_url = stack.enter_context(redis_server())
        ports = [free_port() for _ in range(options.replicas // options.dp)]
        for port in ports:
            command = [sys.executable, "-m", "benchmarks.simulated"]
            command += ["--port", str(port), "--block-ms", str(options.block_ms)]
            command += ["--capacity", str(options.capacity), "--dp", str(options.dp)]
            if redis_url:
                command += ["--redis", redis_url]
            stack.enter_context(process(command, options.log))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for_http(url + "/readyz")
        running = stack.enter_context(
            router(subject, urls, redis_url=redis_url, venv=options.peers_venv, log=options.log)
        )
        before = running.cpu_seconds()
        ttft, failures = uvloop.run(replay(running.port, trace, options.rate))
        cpu = running.cpu_seconds() - before
        stats = [each for url in urls for each in json.load(urllib.request.urlopen(url + "/stats"))]
    blocks, hits = sum(s["blocks"] for s in stats), sum(s["hits"] for s in stats)
    work = [s["blocks"] - s["hits"] for s in stats]
    imbalance = max(work) * len(work) / max(1, sum(work))
    return Outcome(hits / max(1, blocks), ttft, failures, imbalance, cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=120.0, help="requests a second")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--dp", type=int, default=1, help="replicas that are one group's members")
    parser.add_argument("--capacity", type=int, default=10_000, help="blocks of a replica's cache")
    parser.add_argument("--block-ms", type=float, default=1.0, help="prefill cost of a block")
    parser.add_argument("--id-tokens", type=int, default=BLOCK_TOKENS, help="of each hash id")
    parser.add_argument("--subjects", default="", help="comma-separated; default: all there are")
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--log", type=Path, help="where the processes' output goes")
    options = parser.parse_args()
    if options.id_tokens < BLOCK_TOKENS or options.id_tokens % BLOCK_TOKENS:
        parser.error(f"--id-tokens must be a multiple of {BLOCK_TOKENS}")
    if options.replicas % options.dp:
        parser.error("--dp must divide --replicas")
    trace = load_trace(options.trace, options.requests, options.id_tokens // BLOCK_TOKENS)
    subjects = options.subjects.split(",") if options.subjects else ["radixgrove"]
    if not options.subjects:
        subjects += available_peers(options.peers_venv)
    groups = f" in groups of {options.dp}" if options.dp > 1 else ""
    workload = (
        f"{options.trace.stem}, {options.id_tokens} tokens an id, "
        f"{len(trace)} requests at {options.rate:g}/s, "
        f"{options.replicas} replicas{groups} x {options.capacity} blocks, "
        f"{options.block_ms:g} ms/block"
    )
    rows = []
    for subject in subjects:
        outcome = measure(subject, trace, options)
        milliseconds = [1000 * value for value in outcome.ttft] or [float("nan")]
        figures = {
            "hit_rate": (100 * outcome.hit_rate, "%"),
            "ttft_p50": (percentile(milliseconds, 0.5), "ms"),
            "ttft_p90": (percentile(milliseconds, 0.9), "ms"),
            "ttft_p99": (percentile(milliseconds, 0.99), "ms"),
            "imbalance": (outcome.imbalance, "max/mean"),
            "failures": (outcome.failures, "requests"),
            "cpu": (1000 * outcome.cpu / len(trace), "ms/request"),
        }
        for metric, (value, unit) in figures.items():
            results.record(
                {
                    "benchmark": "router_replay",
                    "workload": workload,
                    "model": MODEL,
                    "subject": subject,
                    "metric": metric,
                    "value": round(value, 3),
                    "unit": unit,
                    "device": "cpu",
                }
            )
        rows.append([subject, *(f"{value:.2f}" for value, _ in figures.values())])
        print(rows[-1], flush=True)
    print(workload)
    head = [
        "router",
        "hit %",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "imbalance",
        "failed",
        "CPU ms/request",
    ]
    print(table(rows, head))


if __name__ == "__main__":
    main()
