"""Faults of ranks under load: a group of two or three machines loses one, again and again.

    python -m tests.drills.groups --kills 20 --freezes 10 --cuts 10 --record benchmarks/results

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
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import results
from tests.drills.load import Answer, End, judge
from tests.worker.execution import tiny
from tests.worker.parallel.machines import MachineProcess, Network, group, network, served_model

CLIENTS = 4
STEP_TIMEOUT = 3.0  # as `machines` sets it
IN_TIME = {"kill": 10.0, "freeze": 10.0 + STEP_TIMEOUT, "cut": 10.0 + STEP_TIMEOUT}  # seconds
GIVEN_UP = 60.0
SETTLED = 2.0  # seconds of load before a fault
UNREACHABLE = "unreachable"  # no connection was accepted
_LAST = 8  # lines of a machine


@dataclass
class Load:
    """Clients of machine 0, each with one request at a time; every second one is a stream."""

    machine: MachineProcess
    ends: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.over.is_set():
            tokens = rng.randint(5, 60)
            stream = rng.random() < 0.5
            prompt = rng.choice(tiny.prompts()[:6])
            try:
                end = self._ask(prompt, tokens, stream).value
            except OSError:
                end = UNREACHABLE
            self.ends[end] += 1
            if end != End.WHOLE.value:
                self.over.wait(0.1)

    def _ask(self, prompt: list[int], tokens: int, stream: bool) -> End:
        """Raises OSError: no connection is accepted."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        connection = http.client.HTTPConnection(self.machine.address, self.machine.port, timeout=20)
        try:
            connection.connect()
            answer = _exchange(connection, json.dumps(body))
        finally:
            connection.close()
        end, texts = judge(answer, None, stream=stream)
        short = end is End.WHOLE and len(texts[0].split()) < tokens
        return End.TRUNCATED if short else end


def _exchange(connection: http.client.HTTPConnection, body: str) -> Answer:
    answer = Answer()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        while part := response.read1():
            answer.raw += part
        if response.length:  # of a body with a length, the end of which `read1` takes for its own
            answer.broken = f"{response.length} bytes are missing"
    except (OSError, http.client.HTTPException) as error:
        answer.broken = repr(error)
    return answer


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
        space = net.prefixes[rank][-1]
        subprocess.run(["ip", "-n", space, "link", "set", "eth0", "down"], check=True)
    # Machine 0 cannot know which end of a link is cut: alone, it names the others.
    return rf"rank {rank}\b" if rank else r"rank 1\b"


FAULTS: dict[str, Callable[[int, list[MachineProcess], Network], str]] = {
    "kill": kill,
    "freeze": freeze,
    "cut": cut,
}


def play(kind: str, machines_count: int, rank: int, model_dir: Path) -> Outcome:
    with (
        network(machines_count) as net,
        group(net, model_dir, served_model_name=["m"]) as machines,
    ):
        if not net.links:
            raise SystemExit("needs root, for network namespaces")
        machines[0].wait_for("ready after")
        load = Load(machines[0])
        clients = [threading.Thread(target=load.run, args=(n,)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(SETTLED)
        family = [psutil.Process(machine.process.pid) for machine in machines]
        family += [child for agent in family for child in agent.children(recursive=True)]
        began = time.monotonic()
        name = FAULTS[kind](rank, machines, net)
        while time.monotonic() - began < GIVEN_UP and any(map(_runs, family)):
            time.sleep(0.05)
        seconds = time.monotonic() - began
        left = [" ".join(process.cmdline()) for process in family if _runs(process)]
        left += [port for prefix in net.prefixes for port in _listening(prefix)]
        load.over.set()
        for client in clients:
            client.join()
        said = [_last_lines(machine) for machine in machines]
        named = re.search(name, said[0]) is not None
        in_time = seconds <= IN_TIME[kind]
        silent = load.ends[End.TRUNCATED.value]
        if (kind, rank) != ("cut", 0):  # which takes machine 0 away from its clients
            silent += load.ends[End.LOST.value]
        return Outcome(seconds, in_time, named, left, silent, load.ends, "\n".join(said))


def _listening(prefix: list[str]) -> list[str]:
    """Sockets that a machine listens on."""
    command = [*prefix, "ss", "-Hltn"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _last_lines(machine: MachineProcess) -> str:
    lines = [line for line in machine.lines if "radixgrove.access" not in line]
    return f"{machine.address}:\n" + "".join(lines[-_LAST:])


def _runs(process: psutil.Process) -> bool:
    """A frozen one that was killed is a zombie until its agent has looked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in FAULTS:
        parser.add_argument(f"--{kind}s", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="a directory of results")
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    random.seed(arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = served_model(Path(scratch))
        for kind in FAULTS:
            outcomes = []
            for _ in range(getattr(arguments, f"{kind}s")):
                machines = rng.choice((2, 3))
                rank = rng.randrange(machines)
                outcome = play(kind, machines, rank, model_dir)
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
