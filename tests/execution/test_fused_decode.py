"""Decode steps whose attention takes the projection give what rotating and storing before gives.

With the references of CUDA's kernels in their places, on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixgrove.kernels.decode import rope_decode_attention_reference
from radixgrove.worker.execution import build
from radixgrove.worker.execution.attention import torch as torch_backend
from radixgrove.worker.execution.attention.base import AttentionBatch
from radixgrove.worker.models.ops import KernelOps

from . import tiny
from .driver import Driver, cpu_runner, greedy

Apart = torch_backend.TorchAttention


class Fused(Apart):
    """As CUDA's backends: decode-only steps take the projection, others what is stored."""

    steps = 0

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.batch = batch
        self.takes_qkv = not batch.num_prefills
        Fused.steps += self.takes_qkv

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        batch, count = self.batch, qkv.shape[0]
        return rope_decode_attention_reference(
            qkv,
            rotation[0],
            self.pool[layer],
            batch.rows[:count],
            batch.kv_lens[:count],
            batch.page_table,
            self.scale,
            q_norm,
            k_norm,
            eps,
        )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "padded"])
def test_positions_and_pages_of_decode_rows_follow_from_their_lengths(
    kind: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(kind, tmp_path)
    prompts = tiny.prompts()[-3:]
    texts = {}
    monkeypatch.setattr(build, "choose_ops", lambda device: KernelOps())
    monkeypatch.setattr(Fused, "steps", 0)
    for backend in (Apart, Fused):
        monkeypatch.setattr(torch_backend, "TorchAttention", backend)
        runner = cpu_runner(tmp_path)
        if captured:
            runner.capture([1, 4, 8], lambda text, done: None)
        results = Driver(runner).generate(prompts, greedy(40))  # past a page's end
        texts[backend] = [result.tokens for result in results]
    assert Fused.steps >= 39, "every step behind the prompts should have taken the projection"
    assert texts[Fused] == texts[Apart]
    assert all(len(tokens) == 40 for tokens in texts[Fused])
    assert torch.tensor(texts[Fused]).unique().numel() > 3
