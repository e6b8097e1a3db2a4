"""`radixgrove bench serve`."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from radixgrove.cli.client import Unreachable, api_key, fetch, url_option
from radixgrove.service import exit_codes

if TYPE_CHECKING:
    from radixgrove.cli.bench.sender import Job, Outcome
    from radixgrove.cli.bench.workload import PlannedRequest

_SENDER = "radixgrove.cli.bench.sender"
_HEAD_START = 0.5  # seconds between the last sender's readiness and the common start
_MAX_PROCESSES = 64


@dataclass(frozen=True, kw_only=True)
class _Load:
    """What `bench serve` was asked for: a field an option."""

    url: str
    model: str | None
    trace: Path | None
    rate: float | None
    concurrency: int | None
    requests: int | None
    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    prefixes: int
    speed: float
    block_characters: int
    chat: bool
    ignore_eos: bool
    temperature: float
    slo_ttft: float
    slo_tpot: float
    processes: int
    timeout: float
    seed: int | None
    results: Path | None
    subject: str
    workload: str | None


@click.group(help="Measure a running endpoint.")
def bench() -> None:
    pass


@bench.command("serve", short_help="Load an endpoint.")
@url_option
@click.option("--model", help="Model id; the endpoint's first one when absent.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with output_length, hash_ids or token_ids, at will timestamp (ms) and seed; "
    "without a trace requests are made up.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Open loop: requests/s.")
@click.option("--concurrency", type=click.IntRange(1, 10_000), help="Closed loop: so many at once.")
@click.option("--requests", type=click.IntRange(min=1), help="How many (100, or the whole trace).")
@click.option("--input-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Shared beginning of made-up requests.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="How many different beginnings there are.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Time of the trace, sped up.",
)
@click.option(
    "--block-characters",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Text of one hash id of the trace.",
)
@click.option("--chat/--completions", default=False, show_default=True, help="Which API.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Generate exactly as many tokens as planned.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="Of the sampling.",
)
@click.option(
    "--slo-ttft",
    type=click.FloatRange(min=0),
    default=500.0,
    show_default=True,
    help="Service level: ms to the first token.",
)
@click.option(
    "--slo-tpot",
    type=click.FloatRange(min=0),
    default=50.0,
    show_default=True,
    help="Service level: ms a further token.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, _MAX_PROCESSES),
    default=1,
    show_default=True,
    help="Processes that send.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds a request may take.",
)
@click.option("--seed", type=int, help="Same seed, same prompts; drawn and printed when absent.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append one JSON line a figure to this file.",
)
@click.option("--subject", default="radixgrove", show_default=True, help="Name in the results.")
@click.option("--workload", help="Name of the workload in the results.")
def serve(**options: Any) -> int:
    """Load an endpoint and report latency, throughput, hit rate and goodput.

    --rate sends at random times of that mean rate whatever the answers do (open loop);
    --concurrency keeps so many requests running (closed loop); a trace without either is sent at
    its own times.
    """
    from radixgrove.cli.bench import report

    load = _completed(_Load(**options))
    planned = _plan(load)
    outcomes = _send(_jobs(load, planned))
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    objective = report.Objective(load.slo_ttft / 1000, load.slo_tpot / 1000)
    found = report.figures(samples, objective, [outcome.cpu_seconds for outcome in outcomes])
    click.echo(report.table(found, samples, objective))
    if load.results is not None:
        report.append_results(load.results, found, _labels(load, len(planned)))
    return exit_codes.OK if any(s.error is None for s in samples) else exit_codes.FAILED


def _completed(load: _Load) -> _Load:
    """With what is chosen where no option says it."""
    if load.rate is not None and load.concurrency is not None:
        raise click.UsageError("--rate is an open loop, --concurrency a closed one: choose")
    if load.rate is None and load.concurrency is None and load.trace is None:
        load = replace(load, concurrency=8)
    if load.seed is None:
        load = replace(load, seed=secrets.randbits(32))
        click.echo(f"seed {load.seed}", err=True)
    if not load.model:
        first = fetch(load.url, "GET", "/v1/models", key=api_key())["data"][0]
        load = replace(load, model=str(first["id"]))
    return load


def _plan(load: _Load) -> list[PlannedRequest]:
    """The requests to send, and when."""
    from radixgrove.cli.bench.workload import WorkloadError, read_trace, spread, synthesize

    assert load.seed is not None
    try:
        if load.trace is not None:
            planned = read_trace(
                load.trace,
                block_characters=load.block_characters,
                limit=load.requests,
                speed=load.speed,
            )
        else:
            planned = synthesize(
                requests=load.requests or 100,
                input_tokens=load.input_tokens,
                output_tokens=load.output_tokens,
                prefix_tokens=load.prefix_tokens,
                prefixes=load.prefixes,
                seed=load.seed,
            )
    except WorkloadError as error:
        raise click.UsageError(str(error)) from None
    if load.chat and any(request.token_ids is not None for request in planned):
        raise click.UsageError("a chat has messages: token ids need --completions")
    return planned if load.rate is None else list(spread(planned, load.rate, load.seed))


def _jobs(load: _Load, planned: list[PlannedRequest]) -> list[Job]:
    """One a process that sends."""
    from radixgrove.cli.bench.sender import Job

    assert load.model is not None
    processes = min(load.processes, len(planned), load.concurrency or load.processes)
    return [
        Job(
            url=load.url.rstrip("/").removesuffix("/v1"),
            model=load.model,
            key=api_key(),
            chat=load.chat,
            ignore_eos=load.ignore_eos,
            concurrency=_share(load.concurrency, processes, index),
            timeout=load.timeout,
            requests=planned[index::processes],
            temperature=load.temperature,
        )
        for index in range(processes)
    ]


def _labels(load: _Load, requests: int) -> dict[str, Any]:
    """What the lines of a results file say beside their figures."""
    loop = f"concurrency {load.concurrency}" if load.concurrency else f"rate {load.rate or 'trace'}"
    return {
        "benchmark": "serve",
        "workload": load.workload or f"{requests} requests, {loop}",
        "model": load.model,
        "subject": load.subject,
        "device": _device(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _share(total: int | None, parts: int, index: int) -> int | None:
    """How many of `total` part `index` gets, as evenly as possible."""
    return None if total is None else total // parts + (index < total % parts)


def _send(jobs: list[Job]) -> list[Outcome]:
    """Run one sender a job and gather what they saw.

    Raises:
        Unreachable: a sender failed.
    """
    import msgspec

    from radixgrove.cli.bench.sender import Outcome

    senders = [
        subprocess.Popen(
            [sys.executable, "-m", _SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in jobs
    ]
    try:
        for sender, job in zip(senders, jobs, strict=True):
            assert sender.stdin is not None
            sender.stdin.write(msgspec.json.encode(job) + b"\n")
            sender.stdin.flush()
        for sender in senders:
            assert sender.stdout is not None
            if sender.stdout.readline() != b"ready\n":
                raise Unreachable("a sending process failed; its error is above")
        start = f"{time.time() + _HEAD_START}\n".encode()
        with ThreadPoolExecutor(len(jobs)) as pool:
            outputs = list(pool.map(lambda sender: sender.communicate(start)[0], senders))
        if any(sender.returncode != 0 for sender in senders):
            raise Unreachable("a sending process failed; its error is above")
    finally:
        for sender in senders:
            if sender.poll() is None:
                sender.kill()
                sender.wait()
    return [msgspec.json.decode(output, type=Outcome) for output in outputs]


def _device() -> str:
    from radixgrove.cli.cluster import visible_gpus

    gpus = visible_gpus()
    return f"{len(gpus)} GPUs" if gpus else "cpu"


def _commit() -> str | None:
    result = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.stdout.strip() or None if result.returncode == 0 else None
