"""What a router adds: latency and CPU at 2 KB and 64 KB, requests a second at 32 connections, and
the CPU of a stream's events.

The prompt is a conversation known up to a new last turn of 256 characters, different in every
request; tokenizing and hashing are included for routers that do them. Tokenizing and hashing alone
are measured too, cold and as the next turn of a known conversation.

    python -m benchmarks.load.router_overhead [--peers-venv VENV] [--processes 1,2] [--seconds 5]
    python -m benchmarks.load.router_overhead --beside CHECKOUT       # CPU beside another commit's
    python -m benchmarks.load.router_overhead --whole-path demo       # router + worker: 2 and 24 KB
    python -m benchmarks.load.router_overhead --whole-path two-layers # random weights: 2 and 64 KB
    python -m benchmarks.load.router_overhead --worker URL --router URL --model NAME --sizes 2,64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop
from tokenizers import Tokenizer

from benchmarks import results
from benchmarks.load.echo_worker import EVENTS
from benchmarks.load.http_load import Connection, percentile
from benchmarks.load.subjects import (
    RunningRouter,
    available_peers,
    process,
    redis_server,
    router,
    table,
    wait_for_http,
)
from benchmarks.simulated import MODEL
from radixgrove.cli.redis_server import free_port
from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.openai.parsing import parse_chat
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.agent import demo_model

SIZES = {"2 KB": 2 << 10, "64 KB": 64 << 10}
LAST_TURN = 256
TURN = 1500  # characters of an earlier turn
PATH = "/v1/chat/completions"
CONNECTIONS = 32
STREAMS = 8  # at once
UNMEASURED = 20  # requests before those that are timed
_TEXT = (
    "the of and a to in is that it was for on are as with his they at be this from have or by "
    "one had not but what all were when we there can an your which their said if do will each "
    "about how up out them then she many some so these would other into has more her two like "
    "him see time could no make than first been its who now people my made over did down only "
    "way find "
)
WORDS = re.findall(r"\w+", _TEXT)


def text(size: int, generator: random.Random) -> str:
    words, length = [], 0
    while length < size:
        word = generator.choice(WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


class Conversation:
    """Bodies of one conversation, each with a last turn of its own."""

    def __init__(
        self, size: int, model: str, seed: int = 1, max_tokens: int = 1, *, stream: bool = False
    ) -> None:
        self._random = random.Random(seed)
        history = text(size - LAST_TURN, self._random)
        messages = [
            {"role": "user" if i % 2 == 0 else "assistant", "content": history[at : at + TURN]}
            for i, at in enumerate(range(0, len(history), TURN))
        ]
        if len(messages) % 2:
            messages.append({"role": "assistant", "content": "Go on."})
        flags = {"stream": True} if stream else {}
        body = {"model": model, "max_tokens": max_tokens, **flags, "messages": messages}
        self._head = msgspec.json.encode(body)[:-2] + b',{"role":"user","content":"'

    def body(self) -> bytes:
        return self._head + text(LAST_TURN, self._random).encode() + b'"}]}'


async def latency(port: int, conversation: Conversation, count: int) -> list[float]:
    """Seconds of each request, one after the other, after a few unmeasured ones."""
    connection = Connection(port)
    times = []
    for number in range(count + UNMEASURED):
        reply = await connection.post(PATH, conversation.body())
        if reply.status != 200:
            raise SystemExit(f"status {reply.status}: {reply.body[:200]!r}")
        if number >= UNMEASURED:
            times.append(reply.total)
    connection.close()
    return times


async def throughput(port: int, conversation: Conversation, seconds: float) -> float:
    """Requests a second over `CONNECTIONS` connections that are always busy."""
    end = time.perf_counter() + seconds
    done = 0

    async def busy() -> None:
        nonlocal done
        connection = Connection(port)
        while time.perf_counter() < end:
            if (await connection.post(PATH, conversation.body())).status == 200:
                done += 1
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(busy() for _ in range(CONNECTIONS)))
    return done / (time.perf_counter() - started)


async def streams(port: int, conversation: Conversation, each: int) -> None:
    """`each` streams over each of `STREAMS` connections."""

    async def read() -> None:
        connection = Connection(port)
        for _ in range(each):
            reply = await connection.post(PATH, conversation.body())
            if reply.status != 200 or b"[DONE]" not in reply.body:
                raise SystemExit(f"status {reply.status}: {reply.body[-200:]!r}")
        connection.close()

    await asyncio.gather(*(read() for _ in range(STREAMS)))


class Report:
    """Figures as they come: into the results file and, at the end, a table."""

    def __init__(self, benchmark: str, model: str) -> None:
        self._benchmark = benchmark
        self._model = model
        self.rows: list[list[object]] = []

    def add(self, subject: str, workload: str, metric: str, value: float, unit: str) -> None:
        results.record(
            {
                "benchmark": self._benchmark,
                "workload": workload,
                "model": self._model,
                "subject": subject,
                "metric": metric,
                "value": round(value, 4),
                "unit": unit,
                "device": "cpu",
            }
        )
        self.rows.append([subject, workload, metric, f"{value:.3f}", unit])
        print(*self.rows[-1], flush=True)


def measure_direct(report: Report, port: int, options: argparse.Namespace) -> dict[str, float]:
    """One echo worker without a router; its median milliseconds by size."""
    direct = {}
    for name, size in SIZES.items():
        times = uvloop.run(latency(port, Conversation(size, MODEL), options.requests))
        direct[name] = 1000 * percentile(times, 0.5)
        report.add("direct", name, "p50", direct[name], "ms")
    rate = uvloop.run(throughput(port, Conversation(SIZES["2 KB"], MODEL), options.seconds))
    report.add("direct", f"2 KB, {CONNECTIONS} connections", "throughput", rate, "requests/s")
    return direct


def measure(
    report: Report,
    subject: str,
    running: RunningRouter,
    direct: dict[str, float],
    options: argparse.Namespace,
) -> None:
    """One router before the echo workers."""
    port = running.port
    for name, size in SIZES.items():
        before = running.cpu_seconds()
        times = uvloop.run(latency(port, Conversation(size, MODEL), options.requests))
        used = running.cpu_seconds() - before
        p50 = 1000 * percentile(times, 0.5)
        report.add(subject, name, "p50", p50, "ms")
        report.add(subject, name, "added p50", p50 - direct[name], "ms")
        report.add(
            subject, name, "CPU", 1000 * used / (options.requests + UNMEASURED), "ms/request"
        )
    workload, before = f"2 KB, {CONNECTIONS} connections", running.cpu_seconds()
    rate = uvloop.run(throughput(port, Conversation(SIZES["2 KB"], MODEL), options.seconds))
    used = running.cpu_seconds() - before
    report.add(subject, workload, "throughput", rate, "requests/s")
    report.add(subject, workload, "CPU", 1000 * used / (rate * options.seconds), "ms/request")
    conversation = Conversation(SIZES["2 KB"], MODEL, stream=True)
    before = running.cpu_seconds()
    uvloop.run(streams(port, conversation, options.streams))
    used = running.cpu_seconds() - before
    report.add(
        subject,
        f"{STREAMS} streams",
        "CPU",
        1e6 * used / (STREAMS * options.streams * EVENTS),
        "µs/event",
    )


def beside(report: Report, urls: list[str], redis_url: str, options: argparse.Namespace) -> None:
    """CPU of this checkout's router as a share of another's: both run, and take turns, so that what
    else the machine does falls on both."""
    ratios: dict[str, list[float]] = {name: [] for name in SIZES}
    conversations = {name: Conversation(size, MODEL) for name, size in SIZES.items()}
    with contextlib.ExitStack() as stack:
        routers = [
            stack.enter_context(
                router("radixgrove", urls, redis_url=redis_url, log=options.log, checkout=checkout)
            )
            for checkout in (None, options.beside)
        ]
        for number in range(options.rounds + 1):
            for name, conversation in conversations.items():
                used = {}
                for running in routers if number % 2 else reversed(routers):
                    before = running.cpu_seconds()
                    uvloop.run(latency(running.port, conversation, options.requests))
                    used[running] = running.cpu_seconds() - before
                if number:  # in the first round they learn the words
                    ratios[name].append(used[routers[0]] / used[routers[1]])
    for name, values in ratios.items():
        metric = f"CPU beside {options.beside.name}, median of {len(values)} turns"
        report.add("radixgrove", name, metric, percentile(values, 0.5), "ratio")


def timed(work: Callable[[], object], repeat: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return percentile(times, 0.5)


def encoding(report: Report, files: TokenizerFiles) -> None:
    """Tokenizing and hashing alone, in this process."""
    limits = ModelLimits(max_model_len=1 << 20, vocab_size=1 << 17)
    hasher = BlockHasher(b"", "echo", 16)
    tokenizer = files.tokenizer()
    for name, size in SIZES.items():
        for metric, value in encoding_times(files, tokenizer, hasher, limits, size).items():
            subject = "tokenizers" if metric.startswith("plain") else "radixgrove"
            report.add(subject, name, metric, value, "ms")


def encoding_times(
    files: TokenizerFiles,
    tokenizer: Tokenizer,
    hasher: BlockHasher,
    limits: ModelLimits,
    size: int,
) -> dict[str, float]:
    """Median milliseconds of each part."""
    conversation = Conversation(size, MODEL)
    plain = text(size, random.Random(7))
    requests = iter([parse_chat(conversation.body(), limits) for _ in range(60)])
    encoders = [PromptEncoder(files, hasher) for _ in range(3)]
    body = conversation.body()
    ids = PromptEncoder(files, hasher).encode_chat(next(requests)).token_ids
    fresh = iter(encoders)
    return {
        "plain text, cold": timed(lambda: tokenizer.encode(plain), 5),
        "render, tokenize, hash: cold": timed(lambda: next(fresh).encode_chat(next(requests)), 3),
        "render, tokenize, hash: next turn": timed(
            lambda: encoders[0].encode_chat(next(requests)), 50
        ),
        "parse": timed(lambda: parse_chat(body, limits), 50),
        "hash alone": timed(lambda: hasher.chain(ids), 20),
    }


async def alternating(
    ports: dict[str, int], conversation: Conversation, count: int
) -> dict[str, list[float]]:
    """Seconds of each request, by whom it went to: in turns, since an engine is not always equally
    fast. No turn of the conversation comes twice, or the second would be cached whole."""
    connections = {subject: Connection(port) for subject, port in ports.items()}
    times: dict[str, list[float]] = {subject: [] for subject in ports}
    for number in range(count + 5):
        for subject, connection in connections.items():
            reply = await connection.post(PATH, conversation.body())
            if reply.status != 200:
                raise SystemExit(f"status {reply.status}: {reply.body[:200]!r}")
            if number >= 5:
                times[subject].append(reply.total)
    for connection in connections.values():
        connection.close()
    return times


def whole_path(report: Report, options: argparse.Namespace) -> None:
    """Router and worker against the worker alone: tokenizing moves from one to the other."""
    ports = {
        "worker": urlsplit(options.worker).port or 80,
        "router + worker": urlsplit(options.router).port or 80,
    }
    for kilobytes in map(int, options.sizes.split(",")):
        conversation = Conversation(kilobytes << 10, options.model)
        times = uvloop.run(alternating(ports, conversation, options.requests))
        p50 = {subject: 1000 * percentile(values, 0.5) for subject, values in times.items()}
        workload = f"{kilobytes} KB"
        for subject, value in p50.items():
            report.add(subject, workload, "p50", value, "ms")
        added = p50["router + worker"] - p50["worker"]
        report.add("router + worker", workload, "added p50", added, "ms")


# Little beside the tokenizer's work: what is left of an answer's time is the way of the request.
TWO_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 49152,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def two_layers(directory: Path) -> list[str]:
    """Options of `radixgrove up` for a tiny model of random weights with the demo's tokenizer."""
    for name, content in TokenizerFiles.load(demo_model.ensure()).contents.items():
        (directory / name).write_bytes(content)
    (directory / "config.json").write_text(json.dumps(TWO_LAYERS))
    return ["--model", str(directory), "--load-format", "dummy"]


def whole_path_of_own(options: argparse.Namespace) -> Report:
    """The whole path through a cluster of this benchmark's own: one replica, one router."""
    demo = options.whole_path == "demo"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        model = [] if demo else two_layers(Path(name))
        options.model = "SmolLM2-135M-Instruct" if demo else "two-layers"
        port, management = free_port(), free_port()
        command = [sys.executable, "-m", "radixgrove.cli", "up", "--replicas", "1", *model]
        command += ["--port", str(port), "--management-port", str(management), "--device", "cpu"]
        command += ["--kv-tokens", "65536", "--served-model-name", options.model]
        stack.enter_context(process(command, options.log))
        options.router = f"http://127.0.0.1:{port}"
        wait_for_http(options.router + "/readyz", 150)
        with urllib.request.urlopen(f"http://127.0.0.1:{management}/status") as response:
            options.worker = json.load(response)["replicas"][0]["url"]
        options.sizes = "2,24" if demo else "2,64"
        report = Report("router_whole_path", options.model)
        whole_path(report, options)
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--processes", default="1", help="of radixgrove's router, comma-separated")
    parser.add_argument("--subjects", default="", help="comma-separated; default: all there are")
    parser.add_argument("--requests", type=int, default=1000, help="per latency figure")
    parser.add_argument("--seconds", type=float, default=5.0, help="per throughput figure")
    parser.add_argument("--streams", type=int, default=25, help="per connection")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=9, help="of both, with --beside")
    parser.add_argument("--whole-path", choices=["demo", "two-layers"])
    parser.add_argument("--worker", help="a worker's URL, for the whole path")
    parser.add_argument("--router", help="its router's URL")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sizes", default="2,64", help="KB of a prompt on the whole path")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    if options.whole_path or (options.worker and options.router):
        if options.whole_path:
            report = whole_path_of_own(options)
        else:
            report = Report("router_whole_path", options.model)
            whole_path(report, options)
        print(table(report.rows, ["subject", "workload", "metric", "value", "unit"]))
        return
    report = Report("router_overhead", MODEL)
    model_dir = demo_model.ensure()
    files = TokenizerFiles.load(model_dir)
    peers = available_peers(options.peers_venv)
    subjects = options.subjects.split(",") if options.subjects else ["radixgrove", *peers]
    if options.beside is None:
        encoding(report, files)
    with contextlib.ExitStack() as stack:
        redis_url = stack.enter_context(redis_server())
        ports = [free_port() for _ in range(options.replicas)]
        for port in ports:
            command = [sys.executable, "-m", "benchmarks.load.echo_worker"]
            command += ["--port", str(port), "--redis", redis_url, "--model-dir", str(model_dir)]
            stack.enter_context(process(command, options.log))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for_http(url + "/health")
        if options.beside is not None:
            beside(report, urls, redis_url, options)
            return
        direct = measure_direct(report, ports[0], options)
        for subject in subjects:
            counts = options.processes.split(",") if subject == "radixgrove" else ["1"]
            for count in counts:
                name = subject if count == "1" else f"{subject}, {count} processes"
                with router(
                    subject,
                    urls,
                    redis_url=redis_url,
                    venv=options.peers_venv,
                    processes=int(count),
                    log=options.log,
                ) as running:
                    measure(report, name, running, direct, options)
    print(table(report.rows, ["subject", "workload", "metric", "value", "unit"]))


if __name__ == "__main__":
    main()
