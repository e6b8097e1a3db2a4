"""Workers on two machines: one group serves, ends in order, and ends when it loses a rank."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.parallel.machines import (
    ENDS_WITHIN,
    MachineProcess,
    Network,
    group,
    network,
    served_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(2) as made:
        yield made


def wait_ready(machines: list[MachineProcess]) -> None:
    machines[0].wait_for("ready after")
    machines[1].wait_for("all ranks of machine 1 have joined")


def complete(machine: MachineProcess, prompt: list[int], tokens: int) -> tuple[int, bytes]:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return machine.post("/v1/completions", body)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_machines_serve_one_model_and_end_together(
    tp: int, net: Network, model_dir: Path
) -> None:
    prompt = tiny.prompts()[5]
    (expected,) = Driver(cpu_runner(model_dir)).generate([prompt], greedy(16))
    with group(net, model_dir, served_model_name=["m"], tp=tp) as machines:
        wait_ready(machines)
        assert machines[0].readiness() == (200, "serving")
        assert machines[1].readiness() == (200, "joined")
        status, body = complete(machines[0], prompt, 16)
        assert status == 200, body
        text = json.loads(body)["choices"][0]["text"]
        assert text.split() == [f"w{token}" for token in expected.tokens]
        assert machines[1].management()["ranks"] == list(range(tp, 2 * tp))
        # Both pods of a group get SIGTERM; it is rank 0 that says when all is answered.
        machines[1].process.send_signal(signal.SIGTERM)
        assert complete(machines[0], prompt, 4)[0] == 200
        machines[0].process.send_signal(signal.SIGTERM)
        assert [machine.end() for machine in machines] == [0, 0]


def freeze(machines: list[MachineProcess], net: Network) -> None:
    machines[1].rank(1).suspend()


def kill(machines: list[MachineProcess], net: Network) -> None:
    machines[1].rank(1).kill()


def cut(machines: list[MachineProcess], net: Network) -> None:
    net.cut(1)


@pytest.mark.parametrize(
    "fault", [kill, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (freeze, cut))]
)
def test_a_rank_that_is_lost_ends_the_group_and_is_named(
    fault: Callable[[list[MachineProcess], Network], None], model_dir: Path
) -> None:
    with network(2) as net:
        if fault is cut and not net.links:
            pytest.skip("needs root, for network namespaces")
        with group(net, model_dir, served_model_name=["m"]) as machines:
            wait_ready(machines)
            assert complete(machines[0], [1, 2, 3], 4)[0] == 200
            fault(machines, net)
            began = time.monotonic()
            wait_until(
                lambda: all(machine.process.poll() is not None for machine in machines),
                deadline=ENDS_WITHIN,
                what=f"the group's end, {time.monotonic() - began:.0f} s",
            )
            assert all(machine.end() != 0 for machine in machines)
            assert f"rank 1 (machine 1, {net.addresses[1]})" in "".join(machines[0].lines[-6:])


def test_a_rank_that_freezes_while_the_group_drains_is_named(net: Network, model_dir: Path) -> None:
    options = {"served_model_name": ["m"], "drain_timeout": 120.0}
    with group(net, model_dir, **options) as machines, ThreadPoolExecutor(1) as pool:
        wait_ready(machines)
        machines[1].rank(1).suspend()
        answer = pool.submit(complete, machines[0], [1, 2, 3], 16)
        wait_until(lambda: machines[0].management()["stats"]["running"] > 0, what="the request")
        for machine in machines:
            machine.process.send_signal(signal.SIGTERM)
        assert all(machine.end(ENDS_WITHIN) != 0 for machine in machines)
        assert answer.result()[0] == 503
    last = "".join(machines[0].lines[-6:])
    assert re.search(r"rank 1\b", last)
    assert "while draining" in last


def test_a_machine_that_was_restarted_in_place_waits_to_be_replaced(
    net: Network, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "joined"
    marker.touch()
    monkeypatch.setenv("GROUP_MARKER", str(marker))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with group(net, model_dir) as machines:
        for machine in machines:
            machine.wait_for("restarted in place")
            wait_until(lambda machine=machine: _listens(machine), what="its API port")  # type: ignore[misc]
            assert machine.readiness()[0] == 503
            machine.process.send_signal(signal.SIGTERM)
            assert machine.end() == 0


def _listens(machine: MachineProcess) -> bool:
    try:
        return machine.get("/livez")[0] == 200
    except OSError:
        return False
