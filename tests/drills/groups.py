"""Faults of ranks under load: a group of two or three machines loses one, again and again.

    python -m tests.drills.groups --kills 20 --freezes 10 --cuts 10 --record benchmarks/results

With `--gpus` there are two machines with a GPU each, and stages speak over NCCL.
Each fault gets a group of its own: a stage on each machine, which is a network namespace (root),
and clients that ask without a pause. The fault takes a random rank: SIGKILL, SIGSTOP, or its
machine's link, whose packets are dropped or whose address goes. Then every process of the group
must be gone in time with the ports it listened on, the last lines of machine 0 name the rank, and
every request that was accepted has an answer or an error: none stopped as if it were whole, and
none lost its connection without a word while machine 0 could be reached. One line is printed for
each fault; one of all of a kind is recorded.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks import results
from benchmarks.correctness.models import make_random_model
from radixgrove.protocol.model.directory import load_config
from tests.drills.load import End, judge
from tests.drills.ranks import (
    GIVEN_UP,
    SETTLED,
    Clients,
    complete,
    family_of,
    runs,
    seconds_until_gone,
)
from tests.worker.execution import tiny
from tests.worker.parallel.machines import (
    MachineProcess,
    Network,
    add_words,
    group,
    network,
    served_model,
)

CLIENTS = 4
STEP_TIMEOUT = 3.0  # as `machines` sets it
IN_TIME = {"kill": 10.0, "freeze": 10.0 + STEP_TIMEOUT, "cut": 10.0 + STEP_TIMEOUT}  # seconds
_LAST = 8  # lines of a machine


def ask(machine: MachineProcess, rng: random.Random) -> str:
    """How a request to a machine ended; every second one is a stream.

    Raises:
        OSError: no connection is accepted.
    """
    tokens = rng.randint(5, 60)
    stream = rng.random() < 0.5
    body = {
        "model": "m",
        "prompt": rng.choice(tiny.prompts()[:6]),
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    answer = complete(machine.address, machine.port, body, timeout=GIVEN_UP)
    end, texts = judge(answer, None, stream=stream)
    short = end is End.WHOLE and len(texts[0].split()) < tokens
    return (End.TRUNCATED if short else end).value


@dataclass(frozen=True)
class Outcome:
    """Of one fault."""

    seconds: float  # until the last process of the group had gone
    in_time: bool
    named: bool
    left: list[str]  # processes, and ports that are listened on
    silent: int  # requests that ended without an answer or an error
    ends: Counter[str]  # of requests
    said: str  # by each machine at last

    @property
    def passed(self) -> bool:
        return self.in_time and self.named and not self.left and not self.silent


def made_model(directory: Path, *, gpus: bool) -> Path:
    """One with words for tokens; kernels on GPUs need its heads to be wide."""
    if not gpus:
        return served_model(directory)
    model_dir = make_random_model("llama-8-2", directory)
    add_words(model_dir, load_config(model_dir).vocab_size)
    return model_dir


def kill(rank: int, machines: list[MachineProcess], net: Network) -> str:
    machines[rank].rank(rank).kill()
    return rf"rank {rank}\b"


def freeze(rank: int, machines: list[MachineProcess], net: Network) -> str:
    machines[rank].rank(rank).suspend()
    return rf"rank {rank}\b"


def cut(rank: int, machines: list[MachineProcess], net: Network) -> str:
    if random.random() < 0.5:
        net.cut(rank)
    else:
        subprocess.run(["ip", "-n", net.spaces[rank], "link", "set", "eth0", "down"], check=True)
    # Machine 0 cannot know which end of a link is cut: alone, it names the others.
    return rf"rank {rank}\b" if rank else r"rank 1\b"


FAULTS: dict[str, Callable[[int, list[MachineProcess], Network], str]] = {
    "kill": kill,
    "freeze": freeze,
    "cut": cut,
}


def play(kind: str, machines_count: int, rank: int, model_dir: Path, *, gpus: bool) -> Outcome:
    changes = {"served_model_name": ["m"], "device": "cuda" if gpus else "cpu"}
    with network(machines_count) as net:
        if not net.links:
            raise SystemExit("needs root, for network namespaces")
        if gpus:
            net.give_gpus()
        with group(net, model_dir, **changes) as machines:
            return lose(kind, rank, machines, net)


def lose(kind: str, rank: int, machines: list[MachineProcess], net: Network) -> Outcome:
    """A fault takes a rank while clients ask."""
    machines[0].wait_for("ready after")
    clients = Clients(partial(ask, machines[0]))
    with clients.asking(CLIENTS):
        time.sleep(SETTLED)
        family = family_of([psutil.Process(machine.process.pid) for machine in machines])
        began = time.monotonic()
        name = FAULTS[kind](rank, machines, net)
        seconds = seconds_until_gone(family, began)
        left = [" ".join(process.cmdline()) for process in family if runs(process)]
        left += [port for prefix in net.prefixes for port in _listening(prefix)]
    said = [_last_lines(machine) for machine in machines]
    named = re.search(name, said[0]) is not None
    in_time = seconds <= IN_TIME[kind]
    silent = clients.ends[End.TRUNCATED.value]
    if (kind, rank) != ("cut", 0):  # which takes machine 0 away from its clients
        silent += clients.ends[End.LOST.value]
    return Outcome(seconds, in_time, named, left, silent, clients.ends, "\n".join(said))


def _listening(prefix: list[str]) -> list[str]:
    """Sockets that a machine listens on."""
    command = [*prefix, "ss", "-Hltn"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _last_lines(machine: MachineProcess) -> str:
    lines = [line for line in machine.lines if "radixgrove.access" not in line]
    return f"{machine.address}:\n" + "".join(lines[-_LAST:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in FAULTS:
        parser.add_argument(f"--{kind}s", type=int, default=0)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each of two machines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="a directory of results")
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    random.seed(arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = made_model(Path(scratch), gpus=arguments.gpus)
        for kind in FAULTS:
            outcomes = []
            for _ in range(getattr(arguments, f"{kind}s")):
                machines = 2 if arguments.gpus else rng.choice((2, 3))
                rank = rng.randrange(machines)
                outcome = play(kind, machines, rank, model_dir, gpus=arguments.gpus)
                outcomes.append(outcome)
                failed += not outcome.passed
                print(
                    f"{'ok  ' if outcome.passed else 'FAIL'} {kind} rank {rank} of {machines}: "
                    f"{outcome.seconds:.1f} s, {len(outcome.left)} left, {outcome.silent} silent, "
                    f"{dict(outcome.ends)}",
                    flush=True,
                )
                if not outcome.passed:
                    print(outcome.said, *outcome.left, sep="\n", flush=True)
            if outcomes and arguments.record:
                _record(kind, outcomes, arguments.record)
    return 1 if failed else 0


def _record(kind: str, outcomes: list[Outcome], directory: Path) -> None:
    os.environ["BENCHMARK_RESULTS"] = str(directory)
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    results.record(
        {
            "benchmark": "group_faults",
            "workload": kind,
            "model": None,
            "subject": "a stage on each of two or three machines",
            "metric": "ended_in_time_and_named",
            "value": sum(outcome.passed for outcome in outcomes),
            "unit": "groups",
            "faults": len(outcomes),
            "slowest_s": round(max(outcome.seconds for outcome in outcomes), 1),
            "processes_and_ports_left": sum(len(outcome.left) for outcome in outcomes),
            "ended_silently": sum(outcome.silent for outcome in outcomes),
            "requests": dict(ends),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
