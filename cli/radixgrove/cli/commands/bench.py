"""`radixgrove bench serve`."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from radixgrove.cli.client import Unreachable, api_key, fetch, url_option
from radixgrove.service import exit_codes

if TYPE_CHECKING:
    from radixgrove.cli.bench.sender import Job, Outcome

_SENDER = "radixgrove.cli.bench.sender"
_HEAD_START = 0.5  # seconds between the last sender's readiness and the common start
_MAX_PROCESSES = 64


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
def serve(
    url: str,
    model: str | None,
    trace: Path | None,
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    input_tokens: int,
    output_tokens: int,
    prefix_tokens: int,
    prefixes: int,
    speed: float,
    block_characters: int,
    chat: bool,
    ignore_eos: bool,
    temperature: float,
    slo_ttft: float,
    slo_tpot: float,
    processes: int,
    timeout: float,
    seed: int | None,
    results: Path | None,
    subject: str,
    workload: str | None,
) -> int:
    """Load an endpoint and report latency, throughput, hit rate and goodput.

    --rate sends at random times of that mean rate whatever the answers do (open loop);
    --concurrency keeps so many requests running (closed loop); a trace without either is sent at
    its own times.
    """
    from radixgrove.cli.bench import report
    from radixgrove.cli.bench.sender import Job
    from radixgrove.cli.bench.workload import WorkloadError, read_trace, spread, synthesize

    if rate is not None and concurrency is not None:
        raise click.UsageError("--rate is an open loop, --concurrency a closed one: choose")
    if rate is None and concurrency is None and trace is None:
        concurrency = 8
    if seed is None:
        seed = secrets.randbits(32)
        click.echo(f"seed {seed}", err=True)
    model = model or str(fetch(url, "GET", "/v1/models", key=api_key())["data"][0]["id"])
    try:
        if trace is not None:
            planned = read_trace(
                trace, block_characters=block_characters, limit=requests, speed=speed
            )
        else:
            planned = synthesize(
                requests=requests or 100,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                prefix_tokens=prefix_tokens,
                prefixes=prefixes,
                seed=seed,
            )
    except WorkloadError as error:
        raise click.ClickException(str(error)) from None
    if chat and any(request.token_ids is not None for request in planned):
        raise click.UsageError("a chat has messages: token ids need --completions")
    if rate is not None:
        planned = list(spread(planned, rate, seed))
    processes = min(processes, len(planned), concurrency or processes)
    base = url.rstrip("/").removesuffix("/v1")
    jobs = [
        Job(
            url=base,
            model=model,
            key=api_key(),
            chat=chat,
            ignore_eos=ignore_eos,
            concurrency=_share(concurrency, processes, index),
            timeout=timeout,
            requests=planned[index::processes],
            temperature=temperature,
        )
        for index in range(processes)
    ]
    outcomes = _send(jobs)
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    objective = report.Objective(slo_ttft / 1000, slo_tpot / 1000)
    found = report.figures(samples, objective, [outcome.cpu_seconds for outcome in outcomes])
    click.echo(report.table(found, samples, objective))
    if results is not None:
        loop = f"concurrency {concurrency}" if concurrency else f"rate {rate or 'trace'}"
        name = workload or f"{len(planned)} requests, {loop}"
        report.append_results(
            results,
            found,
            {
                "benchmark": "serve",
                "workload": name,
                "model": model,
                "subject": subject,
                "device": _device(),
                "commit": _commit(),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
    return exit_codes.OK if any(s.error is None for s in samples) else exit_codes.FAILED


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
