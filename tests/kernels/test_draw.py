"""What a decode step on CUDA samples with: kernels on the worker's own state and request table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from radixgrove.kernels import sample, top_k_top_p
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.sampling.draw import draw, draw_by_kernels
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.plan import NewRow, StepPlan

ROWS = 6


@dataclass
class Bench:
    table: RequestTable
    state: SamplingState

    @classmethod
    def make(cls, device: torch.device) -> Bench:
        """Rows of different lengths; every second one is greedy, the others filter differently."""
        bench = cls(
            RequestTable(
                max_rows=ROWS, max_model_len=32, page_size=16, scratch_page=0, device=device
            ),
            SamplingState(ROWS, device, tokens=1 << 20),
        )
        new = [
            NewRow(
                row=row,
                token_ids=np.arange(3 + 2 * row, dtype="<i4").tobytes(),
                prompt_len=2,
                pages=[],
                sampling=SamplingParams(
                    max_tokens=8,
                    seed=row * 7919,
                    temperature=0.4 * row * (row % 2),
                    top_k=10 * row,
                    top_p=1.0 - row / 10,
                    min_p=row / 100,
                ),
            )
            for row in range(ROWS)
        ]
        bench.table.apply(StepPlan(step_id=0, new_rows=new))
        bench.state.enter(new)
        return bench


def distinct_values(count: int) -> Tensor:
    """Numbers in random order that differ in bfloat16 too, as ties are for either to break."""
    order = torch.randperm(count)
    magnitude = (0x3D00 + order // 2).to(torch.int16).view(torch.bfloat16).float()
    return torch.where(order % 2 == 0, magnitude, -magnitude)


@pytest.mark.parametrize(
    "need",
    [
        SamplingFeatures.NOTHING,
        SamplingFeatures.RANDOM,
        SamplingFeatures.RANDOM | SamplingFeatures.FILTER,
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_draw_and_append_as_torch_does(
    need: SamplingFeatures, dtype: torch.dtype, device: torch.device
) -> None:
    ours, reference = Bench.make(device), Bench.make(torch.device("cpu"))
    rows = torch.tensor([5, 0, 3, ROWS, 1, ROWS])
    for _ in range(2):  # the second draw is one position on
        logits = torch.stack([distinct_values(1700) for _ in rows]).to(dtype)
        positions = reference.table.lens.index_select(0, rows).long()
        expected = draw(logits, rows, positions, reference.state, int(need))
        reference.table.append(rows, expected)
        out = torch.empty(6, dtype=torch.int64, device=device)
        tokens = draw_by_kernels(
            logits.to(device), rows.to(device), ours.state, ours.table, int(need), out
        )
        assert tokens is out
        assert tokens.tolist() == expected.tolist()
        assert ours.table.lens.tolist() == reference.table.lens.tolist()
        assert torch.equal(ours.table.tokens[:ROWS].cpu(), reference.table.tokens[:ROWS])


@pytest.mark.parametrize(
    ("need", "kernels"),
    [
        (SamplingFeatures.NOTHING, 2),
        (SamplingFeatures.RANDOM, 2),
        (SamplingFeatures.RANDOM | SamplingFeatures.FILTER, 3),
    ],
    ids=["greedy", "random", "filtered"],
)
def test_a_step_launches_few_kernels(
    need: SamplingFeatures, kernels: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Kernels of ours, and nothing of torch that computes: views and allocations only."""
    launches: list[str] = []
    for module, name in (
        (sample, "_race_kernel"),
        (sample, "_race_winner_kernel"),
        (top_k_top_p, "_thresholds_kernel"),
    ):
        monkeypatch.setattr(module, name, _Counted(getattr(module, name), name, launches))
    bench = Bench.make(device)
    rows = torch.tensor([5, 0, 3], device=device)
    logits = torch.randn(3, 500, device=device)
    with torch.profiler.profile(acc_events=True) as profile:
        draw_by_kernels(logits, rows, bench.state, bench.table, int(need), rows.clone())
    assert len(launches) == kernels
    computed = {"aten::index_select", "aten::index", "aten::_to_copy", "aten::contiguous"}
    assert not computed & {event.key for event in profile.key_averages()}


class _Counted:
    """A kernel that records its launches."""

    def __init__(self, kernel: object, name: str, launches: list[str]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: object) -> object:
        self._launches.append(self._name)
        return self._kernel[grid]  # type: ignore[index]
