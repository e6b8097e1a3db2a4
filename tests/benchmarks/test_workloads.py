"""The offline workloads are the same everywhere, and their limits are those of the card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def workloads(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("workloads")


@pytest.mark.parametrize(
    ("name", "requests", "input_tokens", "output_tokens"),
    [
        ("nano256", 256, 142_827, 133_966),
        ("bs1_decode", 1, 128, 512),
        ("bs64_decode", 64, 8_192, 32_768),
        ("bs256_decode", 256, 32_768, 65_536),
        ("prefill_32x8k", 32, 262_144, 32),
        ("shared_prefix", 512, 1_114_112, 65_536),
    ],
)
def test_workloads_are_deterministic(
    workloads: ModuleType, name: str, requests: int, input_tokens: int, output_tokens: int
) -> None:
    first, second = (workloads.WORKLOADS[name]() for _ in range(2))
    assert first == second
    sizes = (len(first.items), first.input_tokens, first.output_tokens)
    assert sizes == (requests, input_tokens, output_tokens)


def test_a_shared_prefix_is_shared_by_sixteen(workloads: ModuleType) -> None:
    items = workloads.shared_prefix().items
    prefixes = [tuple(item.token_ids[: item.shared]) for item in items]
    assert {prefixes.count(prefix) for prefix in prefixes} == {16}
    assert len({tuple(item.token_ids) for item in items}) == 512
    assert prefixes[:16] != sorted(prefixes)[:16], "groups are shuffled"


def test_conversations_add_up(workloads: ModuleType) -> None:
    """64 clients, 8 rounds, 1,024 tokens sent and 64 got in each."""
    workload = workloads.MultiTurn()
    assert workload.prompt_tokens == 2_473_984
    assert workload.best_hit_share == pytest.approx(0.8095, abs=5e-5)
    assert workload.history_tokens(8) == 8_704
    turns = list(workload.turns())
    assert turns[:2] == [(0, 0), (0, 1)]
    assert turns[64] == (1, 0), "a round begins when every client has had its turn"
    assert len(turns) == 512


def test_no_two_messages_of_conversations_are_the_same(workloads: ModuleType) -> None:
    workload = workloads.MultiTurn(clients=4, rounds=3, new_tokens=32, output_tokens=8)
    messages = workload.messages()
    assert messages == workload.messages()
    assert len({tuple(message) for client in messages for message in client}) == 4 * 3
    assert {len(message) for client in messages for message in client} == {32}


@pytest.mark.parametrize("rounds", [2, 5])
def test_sums_of_conversations_are_those_of_their_turns(workloads: ModuleType, rounds: int) -> None:
    workload = workloads.MultiTurn(clients=3, rounds=rounds, new_tokens=10, output_tokens=4)
    histories = dict.fromkeys(range(3), 0)
    prompts = later_prompts = known = 0
    for number, client in workload.turns():
        prompt = histories[client] + 10
        prompts += prompt
        if number:
            later_prompts += prompt
            known += histories[client]
        histories[client] = prompt + 4
    assert workload.prompt_tokens == prompts
    assert workload.best_hit_share == known / later_prompts
    assert set(histories.values()) == {workload.history_tokens(rounds)}


@pytest.mark.parametrize(
    ("name", "limit"),
    [("nano256", 10_014), ("bs1_decode", 195), ("prefill_32x8k", 45_261)],
)
def test_limits_of_an_8b_model(workloads: ModuleType, name: str, limit: int) -> None:
    """Llama-3.1-8B on an H100: 15 GB of weights a step, 131,072 bytes of KV a token."""
    shape = workloads.ModelShape(
        matrix_parameters=6_979_321_856,
        head_parameters=525_336_576,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )
    assert shape.kv_bytes_per_token == 131_072
    workload = workloads.WORKLOADS[name]()
    seconds = workloads.least_seconds(workload, shape, workloads.H100)
    assert workload.counted_tokens / seconds == pytest.approx(limit, rel=0.01)
    halved = dataclasses.replace(shape, kv_item_bytes=1)
    assert halved.kv_bytes_per_token == 65_536
    saved = seconds - workloads.least_seconds(workload, halved, workloads.H100)
    contexts = sum(
        (item.max_tokens - 1) * (len(item.token_ids) + item.max_tokens / 2)
        for item in workload.items
    )
    assert saved == pytest.approx(contexts * 65_536 / 2.94e12, rel=1e-6)
