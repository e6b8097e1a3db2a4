"""Decode steps that give attention the projection yield what rotating and storing before yields.

With the references of CUDA's kernels in their places, on a CPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from radixgrove.kernels.decode import DecodeWorkspace, rope_decode_attention_reference
from radixgrove.protocol.settings import KVDType
from radixgrove.worker.attention import decode
from radixgrove.worker.attention import torch as torch_backend
from radixgrove.worker.attention.base import AttentionBatch
from radixgrove.worker.attention.decode import DecodingBackend
from radixgrove.worker.execution import loading
from radixgrove.worker.models.ops import KernelOps
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy

Apart = torch_backend.TorchAttention
ways: Counter[tuple[int, str]] = Counter()  # decode-only steps by rows, padding too, and way


class Decoding(DecodingBackend):
    """As CUDA's backends, with torch's attention to what is stored."""

    def __init__(self, pool: Tensor, **geometry: Any) -> None:
        super().__init__(pool, **geometry)
        self._apart = Apart(pool, **geometry)

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._apart.plan(batch)

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        super().plan_captured(batch, padded)
        self._apart.plan(batch)

    def attend_eager(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        if layer == 0 and not self._batch.num_prefills:
            ways[q.shape[0], "apart"] += 1
        return self._apart.attend(layer, q, kv, sinks)

    def attend_qkv(self, layer: int, qkv: Tensor, *rest: Any, **options: Any) -> Tensor:
        if layer == 0:
            ways[qkv.shape[0], "fused"] += 1
        return super().attend_qkv(layer, qkv, *rest, **options)


def rope_decode_attention(
    *arguments: Any, window: int | None, sinks: Tensor | None, quantized: None
) -> Tensor:
    """The kernel's reference, which needs no workspace, and quantizes nothing."""
    assert not window, "no model here has windows"
    assert sinks is None, "nor sinks"
    others = (value for value in arguments if not isinstance(value, DecodeWorkspace))
    return rope_decode_attention_reference(*others)


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_ops", lambda device, dtype: KernelOps())
    monkeypatch.setattr(decode, "rope_decode_attention", rope_decode_attention)


def texts(
    directory: Path, backend: type, sizes: list[int], kv_dtype: KVDType = KVDType.AUTO
) -> list[list[int]]:
    """Of three prompts, past a page's end, one after the other done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "TorchAttention", backend)
        runner = cpu_runner(directory, kv_dtype=kv_dtype)
    if sizes:
        runner.capture(sizes, lambda text, done: None)
    ways.clear()
    results = Driver(runner).generate(tiny.prompts()[-3:], lambda i: greedy(20 + 10 * i))
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("sizes", [[], [1, 4, 8]], ids=["eager", "padded"])
@pytest.mark.parametrize("kv_dtype", KVDType)
def test_positions_and_pages_of_decode_rows_follow_from_their_lengths(
    kind: str, sizes: list[int], kv_dtype: KVDType, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path)
    expected = texts(tmp_path, Apart, sizes, kv_dtype)
    assert texts(tmp_path, Decoding, sizes, kv_dtype) == expected
    assert {way for _, way in ways} == {"fused"}
    assert ways.total() == 39, "every step behind the prompts should have taken the projection"
    assert [len(tokens) for tokens in expected] == [20, 30, 40]
    assert len({token for tokens in expected for token in tokens}) > 3


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([], 2, {(3, "apart"): 19, (2, "fused"): 10, (1, "fused"): 10}),
        ([], 3, {(3, "fused"): 19, (2, "fused"): 10, (1, "fused"): 10}),
        ([1, 2, 4], 3, {(4, "apart"): 19, (2, "fused"): 10, (1, "fused"): 10}),
        ([1, 2, 4], 4, {(4, "fused"): 19, (2, "fused"): 10, (1, "fused"): 10}),
    ],
    ids=["eager, past it", "eager, within", "padded past it", "padded, within"],
)
def test_a_text_may_begin_one_way_and_end_the_other(
    sizes: list[int],
    most: int,
    expected: dict[tuple[int, str], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As rows end, the batch comes below what attention takes the projection of."""
    tiny.save("qwen3", tmp_path)
    monkeypatch.setattr(decode, "FUSED_ROWS", most)
    found = texts(tmp_path, Decoding, sizes)
    assert ways == expected
    assert found == texts(tmp_path, Apart, sizes)
