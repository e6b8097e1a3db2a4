"""Data-parallel members of a real worker: each says what one process says, and all end together."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.worker.engine.executor import build_executor
from tests.conftest import wait_until
from tests.worker.execution import tiny
from tests.worker.parallel.machines import (
    ENDS_WITHIN,
    MachineProcess,
    Network,
    group,
    network,
    served_model,
)
from tests.worker.parallel.ranks import settings
from tests.worker.parallel.serve import serve, submit

TOKENS = 12
PROMPTS = tiny.prompts()[:5]
SAMPLED = {"temperature": 0.9, "seed": 11, "top_k": 20}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model(tmp_path_factory.mktemp("model"))


@contextmanager
def worker(model_dir: Path, **changes: Any) -> Iterator[MachineProcess]:
    """Of two members, on one machine."""
    options = {"served_model_name": ["m"], "dp": 2, "pp": 1, "nodes": 1, "master": None, **changes}
    options["frontend"] = "tests.worker.patient_frontend"
    with group(Network(["127.0.0.1"], [[]], [], []), model_dir, **options) as (machine,):
        machine.wait_for("ready after")
        yield machine


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    fixed = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**fixed, "prompt": prompt, **fields}


def ask(machine: MachineProcess, request: dict[str, Any], dp_rank: int | None) -> Any:
    """The answer of a member, as a router asks it; None: of the one that the worker chooses."""
    envelope = Envelope(
        body=json.dumps(request).encode(),
        prompts=[],
        principal="local",
        request_id="",
        tokenizer_digest="",
        dp_rank=dp_rank,
    )
    headers = {"Content-Type": ENVELOPE_TYPE, INTERNAL_KEY_HEADER: "a key of the installation"}
    status, answer = machine.post("/v1/completions", msgspec.msgpack.encode(envelope), headers)
    assert status == 200, answer
    return json.loads(answer)


def counted(machine: MachineProcess, what: str) -> list[int]:
    """By each member, in its last pulse."""
    return [member["stats"][what] for member in machine.management()["members"]]


def alone(model_dir: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of one process: of each prompt, then of two choices."""
    requests = [submit(f"{i}", prompt, TOKENS) for i, prompt in enumerate(PROMPTS)]
    for choice in range(2):
        sampling = {**SAMPLED, "seed": SAMPLED["seed"] + choice}
        requests.append(submit(f"n-{choice}", PROMPTS[3], TOKENS, **sampling))
    executor, _ = build_executor(settings(1), model_dir, lambda phase: None)
    try:
        answers = serve(executor, settings(1), [requests]).answers.values()
    finally:
        executor.close()
    return [(answer.tokens, answer.logprobs) for answer in answers]


def test_each_member_says_what_one_process_says(model_dir: Path) -> None:
    expected = alone(model_dir)
    with worker(model_dir) as machine:
        for member in (0, 1):
            answers = [ask(machine, body(prompt, logprobs=1), member) for prompt in PROMPTS]
            answers.append(ask(machine, body(PROMPTS[3], logprobs=1, n=2, **SAMPLED), member))
            choices = [choice for answer in answers for choice in answer["choices"]]
            for choice, (tokens, logprobs) in zip(choices, expected, strict=True):
                assert choice["text"].split() == [f"w{token}" for token in tokens]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
            own = TOKENS * len(choices)
            wait_until(
                lambda m=member, n=own: counted(machine, "generated_tokens") == [n, m * n],  # type: ignore[misc]
                what="that each has computed its own, and no more",
            )
            if member == 0:
                assert counted(machine, "steps")[1] == 0, "an idle member runs no steps"
        # Without a router's choice a prefix finds its member.
        prefix = [7, 11, 13] * 60
        usages = [ask(machine, body([*prefix, tail]), None)["usage"] for tail in range(4)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, 176, 176, 176]

        machine.rank(1).kill()
        assert machine.end() != 0
    assert re.search(r"rank 1\b", "".join(machine.lines[-6:])), "the group ends, and names it"


# ---- on two machines -----------------------------------------------------------------------------

APART = {"served_model_name": ["m"], "dp": 2, "pp": 2, "nodes": 2}


def wait_ready(machines: list[MachineProcess]) -> None:
    machines[0].wait_for("ready after")
    machines[1].wait_for("all ranks of machine 1 have joined")


@pytest.mark.slow
def test_members_on_two_machines_serve_at_one_port_and_end_together(model_dir: Path) -> None:
    expected = alone(model_dir)
    with network(2) as net, group(net, model_dir, **APART) as machines:
        first, second = machines
        wait_ready(machines)
        assert (first.readiness(), second.readiness()) == ((200, "serving"), (200, "joined"))
        assert second.management()["ranks"] == [2, 3]
        for member in (1, 0):
            for prompt, (tokens, logprobs) in zip(PROMPTS, expected, strict=False):
                (choice,) = ask(first, body(prompt, logprobs=1), member)["choices"]
                assert choice["text"].split() == [f"w{token}" for token in tokens]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        own = TOKENS * len(PROMPTS)
        wait_until(lambda: counted(first, "generated_tokens") == [own, own], what="its own of each")
        # Both pods of a group get SIGTERM; it is machine 0 that says when all is answered.
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, first, body([1, 2, 3], max_tokens=240), 1)
            wait_until(lambda: counted(first, "running")[1] > 0, what="the second member at work")
            for machine in (second, first):
                machine.process.send_signal(signal.SIGTERM)
            assert len(answer.result()["choices"][0]["text"].split()) == 240
        assert [machine.end() for machine in machines] == [0, 0]


@pytest.mark.slow
def test_a_machine_that_is_cut_off_ends_the_group_and_is_named(model_dir: Path) -> None:
    with network(2) as net:
        if not net.links:
            pytest.skip("needs root, for network namespaces")
        with group(net, model_dir, **APART) as machines:
            wait_ready(machines)
            ask(machines[0], body([1, 2, 3]), 1)
            net.cut(1)
            wait_until(
                lambda: all(machine.process.poll() is not None for machine in machines),
                deadline=ENDS_WITHIN,
                what="the group's end",
            )
            assert all(machine.end() != 0 for machine in machines)
            named = f"machine 1 ({net.addresses[1]}; ranks 2, 3): it has said nothing for 5 s"
            assert named in "".join(machines[0].lines[-6:])


# ---- on one machine ------------------------------------------------------------------------------


def test_a_drain_loses_no_request(model_dir: Path) -> None:
    with worker(model_dir, drain_timeout=60.0) as machine, ThreadPoolExecutor(12) as pool:
        request = body([1, 2, 3], max_tokens=240)
        answers = [pool.submit(ask, machine, request, n % 2) for n in range(12)]
        stages = ("running", "waiting", "finished")
        wait_until(
            lambda: sum(sum(counted(machine, stage)) for stage in stages) == len(answers),
            what="that all requests are taken",
        )
        machine.process.send_signal(signal.SIGTERM)
        for answer in answers:
            assert len(answer.result()["choices"][0]["text"].split()) == 240
        assert machine.end() == 0
