"""A rank of a worker on GPUs is killed or frozen while clients ask: the worker ends, and names it.

    python -m benchmarks.load.rank_faults --model qwen3-0.6b --kinds kill freeze --ranks 1 -- --tp 2

Each fault gets a worker of its own, with random weights; what follows `--` goes to it. Within
`LIMIT` seconds all its processes must be gone, the last lines of its log name the rank, and no
request may have ended as if it were whole.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from benchmarks import results
from benchmarks.load.worker_process import Worker, find_config, started_worker, write_model
from tests.drills.ranks import (
    GIVEN_UP,
    SETTLED,
    Clients,
    complete,
    family_of,
    runs,
    seconds_until_gone,
)

KINDS = ["kill", "freeze"]
LIMIT = 10.0
CLIENTS = 8
TOKENS = 200
LAST_LINES = 12


def ask(port: int, rng: random.Random) -> str:
    """How a stream ended.

    Raises:
        OSError: no connection is accepted.
    """
    body = {
        "model": "m",
        "prompt": [rng.randrange(200) for _ in range(rng.randint(10, 300))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = complete("127.0.0.1", port, body, timeout=GIVEN_UP)
    text = answer.raw.decode(errors="replace")
    return "lost" if answer.broken else _judged(answer.status, text)


def _judged(status: int, text: str) -> str:
    if status != 200 or '"error"' in text:
        return "failed"
    if "data: [DONE]" not in text:
        return "lost"
    return "whole" if f'"completion_tokens":{TOKENS}' in text.replace(" ", "") else "truncated"


def rank_process(worker: Worker, rank: int) -> psutil.Process:
    family = psutil.Process(worker.process.pid).children(recursive=True)
    (found,) = [
        child
        for child in family
        if "radixgrove.worker.engine.loop" in child.cmdline() and child.cmdline()[-1] == str(rank)
    ]
    return found


def play(kind: str, rank: int, config: Path, options: Sequence[str]) -> bool:
    """One fault; whether all was as it must be."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch)
        write_model(config, model_dir)
        sizes = {"frontends": 1, "max_model_len": 1024, "options": options}
        with started_worker(model_dir, "m", **sizes) as worker:  # type: ignore[arg-type]
            clients = Clients(partial(ask, worker.port))
            with clients.asking(CLIENTS):
                time.sleep(SETTLED)
                family = family_of([psutil.Process(worker.process.pid)])
                victim = rank_process(worker, rank)
                began = time.monotonic()
                victim.kill() if kind == "kill" else victim.suspend()
                seconds = seconds_until_gone(family, began)
                left = [process.pid for process in family if runs(process)]
            lines = worker.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    named = any(re.search(rf"rank {rank}\b", line) for line in lines)
    silent = clients.ends["truncated"] + clients.ends["lost"]
    passed = seconds <= LIMIT and named and not left and not silent and clients.ends["whole"] > 0
    print(
        f"{'ok  ' if passed else 'FAIL'} {kind} rank {rank}, {' '.join(options)}: {seconds:.1f} s, "
        f"{'named' if named else 'not named'}, {len(left)} left, {dict(clients.ends)}",
        flush=True,
    )
    if not passed:
        print(*lines, sep="\n", flush=True)
    results.record(
        {
            "benchmark": "group_faults",
            "workload": kind,
            "model": config.name,
            "subject": f"rank {rank} of {' '.join(options)} on GPUs",
            "metric": "ended_in_time_and_named",
            "value": int(passed),
            "unit": "groups",
            "faults": 1,
            "slowest_s": round(seconds, 1),
            "processes_and_ports_left": len(left),
            "ended_silently": silent,
            "requests": dict(clients.ends),
        }
    )
    return passed


def main(argv: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    options = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    arguments = parser.parse_args(given[: len(given) - len(options) - bool("--" in given)])
    _, config = find_config(arguments.model)
    outcomes = [
        play(kind, rank, config, options) for kind in arguments.kinds for rank in arguments.ranks
    ]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
