"""Which way of computing experts is measured, taken and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from zlib import crc32

import pytest
import torch

from radixgrove.kernels import moe, moe_tuning, norm, quantize, routing, tuned_files
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.moe import (
    GROUPED,
    ExpertChoice,
    ExpertPairs,
    ExpertTiles,
    ExpertWeights,
    TileConfig,
)
from radixgrove.kernels.moe_tuning import (
    EXPERT_BUCKETS,
    PAIRS_CANDIDATES,
    ExpertTuner,
    candidates,
    search,
)
from radixgrove.kernels.routing import Router, Routing
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations

Cost = Callable[[ExpertChoice], float]


def weights(experts: int = 8, top_k: int = 2, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    return ExpertWeights(
        Weight.plain(torch.zeros(experts, 8, 16, dtype=dtype)),
        Weight.plain(torch.zeros(experts, 16, 4, dtype=dtype)),
        Router(Routing(top_k)),
    )


def cost_of(choice: ExpertChoice) -> float:
    """Arbitrary, but that the two products' times add up, beside what is fixed."""
    way = choice.pairs or choice.tiles
    if way is None:
        return float("inf")
    fixed = crc32(repr(choice.tiles and choice.tiles.block_m).encode())
    return fixed + crc32(repr(way.gate_up).encode()) + crc32(repr(way.down).encode())


def picking(cost: Cost, seen: list[ExpertChoice] | None = None) -> moe_tuning.Pick:
    def pick(choices: Sequence[ExpertChoice]) -> ExpertChoice:
        if seen is not None:
            seen.extend(choices)
        return min(choices, key=cost)

    return pick


@pytest.mark.parametrize("tokens", EXPERT_BUCKETS)
def test_finds_the_fastest_of_all_combinations(tokens: int) -> None:
    own = weights()
    ways = [moe.default_choice(tokens, own)]
    if tokens <= 16:
        ways += [ExpertChoice(pairs=ExpertPairs(*x)) for x in product(PAIRS_CANDIDATES, repeat=2)]
    for block_m in moe_tuning._heights(tokens, own):
        tiles = (moe_tuning._fitting(block_m, halves, own) for halves in (2, 1))
        ways += [ExpertChoice(tiles=ExpertTiles(block_m, *x)) for x in product(*tiles)]
    assert search(tokens, own, picking(cost_of)) == min(ways, key=cost_of)


@pytest.mark.parametrize("tokens", EXPERT_BUCKETS)
def test_takes_torchs_product_where_that_is_faster(tokens: int) -> None:
    choice = search(tokens, weights(), picking(lambda choice: choice != GROUPED))
    assert choice == GROUPED


@pytest.mark.parametrize("tokens", EXPERT_BUCKETS)
def test_every_kernel_that_is_timed_can_be_compiled_before(tokens: int) -> None:
    def kernels(choice: ExpertChoice) -> set[tuple[object, ...]]:
        way = choice.pairs or choice.tiles
        if way is None:
            return {("grouped",)}
        height = choice.tiles.block_m if choice.tiles else 0
        return {(height, "gate_up", way.gate_up), (height, "down", way.down)}

    timed: list[ExpertChoice] = []
    search(tokens, weights(), picking(cost_of, timed))
    compiled = set().union(*map(kernels, candidates(tokens, weights())))
    assert set().union(*map(kernels, timed)) <= compiled


@pytest.mark.parametrize(("dtype", "height"), [(torch.bfloat16, 128), (torch.float32, 64)])
def test_many_pairs_in_float32_take_blocks_that_fit(dtype: torch.dtype, height: int) -> None:
    choice = moe.default_choice(8192, weights(dtype=dtype))
    assert choice.tiles is not None
    assert choice.tiles.block_m == height


def test_takes_the_next_larger_bucket_of_the_same_shape() -> None:
    tuner, own = ExpertTuner(), weights()
    key = moe_tuning._key(64, 8, own)
    tuner._choices[own.format, key] = GROUPED
    assert tuner.choose(33, 8, own) == tuner.choose(64, 8, own) == GROUPED
    assert tuner.choose(65, 8, own) != GROUPED
    assert tuner.choose(33, 16, own) != GROUPED, "experts of other ranks make fewer pairs here"
    assert tuner.choose(33, 8, weights(top_k=3)) != GROUPED


def test_experts_with_biases_have_choices_of_their_own_without_grouped_mm() -> None:
    plain = weights()
    biased = replace(plain, down_bias=torch.zeros(8, 16, dtype=torch.bfloat16))
    seen: list[ExpertChoice] = []
    for tokens in (1, 64, 8192):
        moe_tuning.search(tokens, biased, picking(cost_of, seen))
        assert GROUPED not in list(moe_tuning.candidates(tokens, biased))
        assert GROUPED in list(moe_tuning.candidates(tokens, plain))
    assert GROUPED not in seen
    assert biased.format != plain.format


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """Kernels that are launched, by name and constants; nothing runs."""
    seen: set[tuple[object, ...]] = set()

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*_: object, **constants: object) -> None:
                seen.add((self.name, *sorted(constants.items())))

            return launch

    for module in (moe, norm, quantize, routing):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(name))
    monkeypatch.setattr(moe_tuning, "_is_tunable", lambda layer: True)
    monkeypatch.setattr(moe_tuning, "_path", lambda layer: Path("absent"))
    return seen


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("float8", [False, True])
def test_all_that_steps_launch_is_compiled_ahead(
    float8: bool, residual: bool, launches: set[tuple[object, ...]]
) -> None:
    """Of any size, by whatever choice is measured to be the fastest, a norm before it included."""
    experts, hidden, inner, load = 16, 128, 256, torch.zeros(16, dtype=torch.int64)

    def stack(rows: int, columns: int) -> Weight:
        payload = torch.zeros(experts, rows, columns, dtype=torch.bfloat16)
        if not float8:
            return Weight.plain(payload)
        block = torch.ones(experts, rows // 128, columns // 128)
        how = {"block": (128, 128), "activations": Activations.GROUP}
        return Weight(payload.to(FLOAT8), torch.bfloat16, block, **how)  # type: ignore[arg-type]

    router = Router(Routing(2), load=load)
    own = ExpertWeights(stack(2 * inner, hidden), stack(hidden, inner), router)
    for job in ExpertTuner().jobs([own], experts, residual, 512):
        if own.can_be_grouped and job.args == (GROUPED,):  # type: ignore[attr-defined]
            continue  # torch's product needs a device
        job()
    compiled = set(launches)
    launches.clear()
    for tokens in (1, 2, 3, 4, 7, 8, 15, 16, 24, 32, 56, 64, 100, 128, 130, 200, 256, 300, 512):
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        logits, stream = torch.zeros(tokens, experts), x if residual else None
        for choice in candidates(moe_tuning.bucket_of(tokens), own):
            if choice == GROUPED:
                continue
            for added_to in (None, x.clone()):
                normed, rows = moe.norm_for_experts(x, x[0], 1e-6, own, choice, added_to)
                moe.experts(normed, logits, own, stream, rows=rows, choice=choice)
                moe.experts(normed, logits, own, stream, choice=choice)  # behind a sum over ranks
    names = {name for name, *_ in compiled}
    assert {"route_kernel", "route_and_sort_kernel", "sort_kernel"} < names
    assert launches == compiled
    assert not load.any()


def test_nothing_is_tuned_off_cuda() -> None:
    tuner = ExpertTuner()
    tuner.tune([weights()], 8, True, 64)
    assert tuner.jobs([weights()], 8, True, 64) == []
    assert tuner.jobs([], 0, True, 64) == []
    assert tuner.choose(1, 8, weights()).pairs is not None


def test_reads_what_it_keeps(tmp_path: Path) -> None:
    choices = [
        GROUPED,
        ExpertChoice(pairs=ExpertPairs(down=PAIRS_CANDIDATES[3])),
        ExpertChoice(tiles=ExpertTiles(64, TileConfig(group=8), TileConfig(stages=2))),
    ]
    known = {(tokens, 8, 8, 16, 4, 2): choice for tokens, choice in enumerate(choices)}
    path = tmp_path / "experts.json"
    entries = [{"key": list(key), **asdict(choice)} for key, choice in known.items()]
    tuned_files.keep(path, entries)
    assert moe_tuning._read(path) == known
    entries[2]["tiles"] = {"block_m": 3}
    path.write_text(json.dumps(entries))
    assert moe_tuning._read(path) == {}
    for text in ("", "null", "[3]", '[{"key": 1}]'):
        path.write_text(text)
        assert moe_tuning._read(path) == {}
