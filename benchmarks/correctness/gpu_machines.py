"""Two stages, on a machine with a GPU each, say what one process says.

    python -m benchmarks.correctness.gpu_machines

Machines are network namespaces (root) with an address each, so stages speak over NCCL's sockets. A
small random model answers greedily in float32 on both, first cold and then from the prefix cache.
Two tokens whose log-probabilities are nearly equal may change places; those are counted as ties.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.correctness.judge import Report
from benchmarks.correctness.models import RANDOM_TIE, make_prompts, make_random_model
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import Device
from tests.worker.parallel.machines import MachineProcess, add_words, group, network

PROMPTS, NEW_TOKENS, AT_ONCE = 24, 64, 8
_SETTINGS: dict[str, Any] = {"served_model_name": ["m"], "kv_tokens": 16384}  # all stays cached


@dataclass(frozen=True)
class Said:
    """To one prompt: tokens, and by how much each was more likely than the next."""

    tokens: list[str]
    margins: list[float]
    cached_tokens: int


def ask(machine: MachineProcess, prompt: list[int]) -> Said:
    """
    Raises:
        RuntimeError: no answer.
    """
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    status, content = machine.post("/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {content[:200]!r}")
    answer: dict[str, Any] = json.loads(content)
    logprobs = answer["choices"][0]["logprobs"]
    tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Said(
        logprobs["tokens"], [top[0] - top[1] for top in tops], details.get("cached_tokens", 0)
    )


def answers(
    model_dir: Path, machines: int, prompts: list[list[int]], device: str
) -> list[list[Said]]:
    """To all prompts, from a cold and from a warm cache; seconds they took are printed."""
    with network(machines) as net:
        if not net.spaces:
            raise SystemExit("needs root, for network namespaces")
        net.give_gpus()
        with group(net, model_dir, **_SETTINGS, device=device) as started:
            started[0].wait_for("ready after")
            turns = []
            for turn in ("cold", "warm"):
                begin = time.perf_counter()
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    turns.append(list(pool.map(partial(ask, started[0]), prompts)))
                print(f"{machines} machines, {turn}: {time.perf_counter() - begin:.1f} s")
            return turns


def differences(ours: list[Said], theirs: list[Said]) -> tuple[list[str], int]:
    """Texts that differ, and how many parted where two tokens were a tie."""
    wrong, ties = [], 0
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is None and len(a.tokens) == len(b.tokens):
            continue
        if at is not None and b.margins[at] < RANDOM_TIE:
            ties += 1
        else:
            wrong.append(f"prompt {number} at token {at}")
    return wrong, ties


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", default="llama-8-2", help="the model")
    parser.add_argument("--device", default="cuda", choices=[Device.CUDA, Device.CPU])
    arguments = parser.parse_args(argv)
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = make_random_model(arguments.random, Path(scratch))
        vocab_size = load_config(model_dir).vocab_size
        add_words(model_dir, vocab_size)
        prompts = make_prompts(Path(scratch), vocab_size)[:PROMPTS]  # of ids alone
        alone, together = (
            answers(model_dir, machines, prompts, arguments.device) for machines in (1, 2)
        )
    for turn, theirs, ours in zip(("cold", "warm"), alone, together, strict=True):
        wrong, ties = differences(ours, theirs)
        cached = [said.cached_tokens for said in ours]
        same = cached == [said.cached_tokens for said in theirs]
        what = f"{arguments.random} fp32 {arguments.device}: two machines = one process, {turn}"
        detail = "; ".join(wrong[:3]) or f"{len(ours)} x {NEW_TOKENS} tokens, {ties} ties"
        report.check(what, not wrong, detail, ties=ties)
        proved = same and any(cached) == (turn == "warm")
        report.check(f"{what}: cached tokens", proved, str(sum(cached)))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
