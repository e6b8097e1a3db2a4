"""The offline workloads are the same everywhere, and their limits are those of the card."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.engine import workloads


@pytest.mark.parametrize(
    ("name", "requests", "input_tokens", "output_tokens"),
    [
        ("nano256", 256, 142_827, 133_966),
        ("bs1_decode", 1, 128, 512),
        ("bs64_decode", 64, 8_192, 32_768),
        ("bs256_decode", 256, 32_768, 65_536),
        ("prefill_32x8k", 32, 262_144, 32),
        ("prefill_1x8k", 1, 8_192, 1),
        ("shared_prefix", 512, 1_114_112, 65_536),
    ],
)
def test_workloads_are_deterministic(
    name: str, requests: int, input_tokens: int, output_tokens: int
) -> None:
    first, second = (workloads.WORKLOADS[name]() for _ in range(2))
    assert first == second
    sizes = (len(first.items), first.input_tokens, first.output_tokens)
    assert sizes == (requests, input_tokens, output_tokens)


def test_a_shared_prefix_is_shared_by_sixteen() -> None:
    items = workloads.shared_prefix().items
    prefixes = [tuple(item.token_ids[: item.shared]) for item in items]
    assert {prefixes.count(prefix) for prefix in prefixes} == {16}
    assert len({tuple(item.token_ids) for item in items}) == 512
    assert prefixes[:16] != sorted(prefixes)[:16], "groups are shuffled"


def test_conversations_add_up() -> None:
    """64 clients, 8 rounds, 1,024 tokens sent and 64 got in each."""
    workload = workloads.MultiTurn()
    assert workload.prompt_tokens == 2_473_984
    assert workload.best_hit_share == pytest.approx(0.8095, abs=5e-5)
    assert workload.history_tokens(8) == 8_704
    turns = list(workload.turns())
    assert turns[:2] == [(0, 0), (0, 1)]
    assert turns[64] == (1, 0), "a round begins when every client has had its turn"
    assert len(turns) == 512


def test_no_two_messages_of_conversations_are_the_same() -> None:
    workload = workloads.MultiTurn(clients=4, rounds=3, new_tokens=32, output_tokens=8)
    messages = workload.messages()
    assert messages == workload.messages()
    assert len({tuple(message) for client in messages for message in client}) == 4 * 3
    assert {len(message) for client in messages for message in client} == {32}


@pytest.mark.parametrize("rounds", [2, 5])
def test_sums_of_conversations_are_those_of_their_turns(rounds: int) -> None:
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


@pytest.fixture
def llama_8b() -> Any:
    """Llama-3.1-8B: 15 GB of weights a step, 131,072 bytes of KV a token."""
    return workloads.ModelShape(
        matrix_parameters=6_979_321_856,
        head_parameters=525_336_576,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )


@pytest.mark.parametrize(
    ("card", "name", "limit"),
    [
        ("H100", "nano256", 10_014),
        ("H100", "bs1_decode", 195),
        ("H100", "prefill_32x8k", 45_261),
        ("H200", "nano256", 13_290),
        ("H200", "bs1_decode", 286),
        ("H200", "bs64_decode", 14_100),
        ("H200", "prefill_32x8k", 49_050),
    ],
)
def test_limits_of_an_8b_model(llama_8b: Any, card: str, name: str, limit: int) -> None:
    workload = workloads.WORKLOADS[name]()
    device = workloads.find_device(f"NVIDIA {card}")
    seconds = workloads.least_seconds(workload, llama_8b, device)
    assert workload.counted_tokens / seconds == pytest.approx(limit, rel=0.01)


def test_a_step_reads_the_experts_that_its_rows_choose() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts for a row, 125.9 for 64, all for many."""
    shape = workloads.ModelShape(
        matrix_parameters=0,
        head_parameters=0,
        layers=0,
        heads=32,
        kv_heads=4,
        head_dim=128,
        expert_parameters=48 * 3 * 2048 * 768,
        experts=128,
        experts_per_token=8,
    )
    chosen = [shape.read_bytes(rows) / (2 * shape.expert_parameters) for rows in (1, 64, 4096)]
    assert chosen == pytest.approx([8, 125.9, 128], abs=0.1)
    one = workloads.Workload("w", [workloads.Item([0], 2)])
    first = workloads.Workload("w", [workloads.Item([0], 1)])
    step = workloads.least_seconds(one, shape, workloads.H200)
    step -= workloads.least_seconds(first, shape, workloads.H200)
    assert step == pytest.approx(8 * shape.expert_parameters * 2 / 4.3e12)


def test_half_the_bytes_of_kv_save_their_reading(llama_8b: Any) -> None:
    workload = workloads.nano256()
    halved = dataclasses.replace(llama_8b, kv_item_bytes=1)
    assert (llama_8b.kv_bytes_per_token, halved.kv_bytes_per_token) == (131_072, 65_536)
    saved = workloads.least_seconds(workload, llama_8b, workloads.H100)
    saved -= workloads.least_seconds(workload, halved, workloads.H100)
    contexts = sum(
        (item.max_tokens - 1) * (len(item.token_ids) + item.max_tokens / 2)
        for item in workload.items
    )
    assert saved == pytest.approx(contexts * 65_536 / 2.94e12, rel=1e-6)


def test_a_step_of_many_rows_is_bound_by_multiplying(llama_8b: Any) -> None:
    """256 rows of an 8B model: 4.9 ms of FLOPs on an H200, 3.5 ms of weights."""
    tiny_kv = dataclasses.replace(llama_8b, layers=0)

    def step(rows: int) -> float:
        items = [workloads.Item([0], 2)] * rows
        both = workloads.least_seconds(workloads.Workload("w", items), tiny_kv, workloads.H200)
        items = [workloads.Item([0], 1)] * rows
        return both - workloads.least_seconds(
            workloads.Workload("w", items), tiny_kv, workloads.H200
        )

    parameters = llama_8b.matrix_parameters + llama_8b.head_parameters
    assert step(64) == pytest.approx(2 * parameters / 4.3e12)
    assert step(256) == pytest.approx(2 * 256 * parameters / 790e12)


def test_a_prefix_is_read_once_a_group_and_step(llama_8b: Any) -> None:
    workload = workloads.shared_prefix()
    alone = dataclasses.replace(
        workload, items=[dataclasses.replace(item, shared=0) for item in workload.items], groups=0
    )
    device = dataclasses.replace(workloads.H200, flops_per_second=1e30)
    saved = workloads.least_seconds(alone, llama_8b, device)
    saved -= workloads.least_seconds(workload, llama_8b, device)
    assert saved == pytest.approx((512 - 32) * 2048 * 127 * 131_072 / 4.3e12, rel=1e-3)


def test_a_head_is_read_in_bytes_of_its_own(llama_8b: Any) -> None:
    fp8 = dataclasses.replace(llama_8b, item_bytes=1)
    saved = llama_8b.read_bytes(1) - fp8.read_bytes(1)
    assert saved == llama_8b.matrix_parameters


def test_weights_of_one_byte_are_multiplied_at_the_rate_of_fp8(llama_8b: Any) -> None:
    workload = workloads.prefill_32x8k()
    fp8 = dataclasses.replace(llama_8b, item_bytes=1, layers=0)
    bf16 = dataclasses.replace(llama_8b, layers=0)
    ratio = workloads.least_seconds(workload, bf16, workloads.H200)
    ratio /= workloads.least_seconds(workload, fp8, workloads.H200)
    assert ratio == pytest.approx(1500 / 790)
    with pytest.raises(ValueError, match="FP8"):
        workloads.least_seconds(workload, fp8, workloads.H100)


@pytest.mark.parametrize(
    ("card", "name"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", None)],
)
def test_a_card_is_found_by_its_name(card: str, name: str | None) -> None:
    assert workloads.find_device(card) is (workloads.DEVICES[name] if name else None)
