"""Choosing an attention backend: the fastest one that works here, said once with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.settings import AttentionChoice
from radixgrove.worker.attention.base import AttentionBackend
from radixgrove.worker.messages import EngineState, PhaseReport
from radixgrove.worker.parallel.group import Shard

_CLASSES = {
    AttentionChoice.FLASHINFER: "FlashInferAttention",
    AttentionChoice.TRITON: "TritonAttention",
    AttentionChoice.TORCH: "TorchAttention",
}
_PREFERENCE = (AttentionChoice.FLASHINFER, AttentionChoice.TRITON, AttentionChoice.TORCH)


def select_attention(
    choice: AttentionChoice,
    pool: Tensor,
    config: ModelConfig,
    shard: Shard,
    windows: Sequence[int],
    dtype: torch.dtype,
    report: Callable[[PhaseReport], None],
) -> tuple[AttentionBackend, str]:
    """The backend for a model of `dtype`, and its name; `windows` are of the pool's layers.

    `auto` tries flashinfer, triton, torch in this order on CUDA, and takes torch on a CPU.

    Raises:
        ModelError: the chosen backend cannot be used here.
    """
    on_cuda = pool.is_cuda
    if choice != AttentionChoice.AUTO:
        if choice != AttentionChoice.TORCH and not on_cuda:
            raise ModelError(f"attention backend {choice.value} needs CUDA")
        try:
            backend = _create(choice, pool, config, shard, windows, dtype)
            _warm_up(backend, report)
        except (ImportError, RuntimeError) as error:
            raise ModelError(f"attention backend {choice.value}: {error}") from error
        report(_chosen(choice, backend, ["as set"]))
        return backend, choice.value
    reasons = []
    for candidate in _PREFERENCE if on_cuda else (AttentionChoice.TORCH,):
        try:
            backend = _create(candidate, pool, config, shard, windows, dtype)
            _warm_up(backend, report)
        except (ImportError, RuntimeError, ValueError) as error:
            reasons.append(f"{candidate.value} not usable: {error}")
            continue
        reasons.append("the fastest here" if on_cuda else "the backend for CPUs")
        report(_chosen(candidate, backend, reasons))
        return backend, candidate.value
    raise ModelError(f"no attention backend works: {'; '.join(reasons)}")


def _chosen(choice: AttentionChoice, backend: AttentionBackend, why: list[str]) -> PhaseReport:
    said = "; ".join([*why, *filter(None, [backend.about])])
    return PhaseReport(EngineState.WARMING_UP, f"attention backend {choice.value} ({said})")


def _warm_up(backend: AttentionBackend, report: Callable[[PhaseReport], None]) -> None:
    backend.warm_up(lambda text, done: report(PhaseReport(EngineState.WARMING_UP, text, done)))


def _create(
    choice: AttentionChoice,
    pool: Tensor,
    config: ModelConfig,
    shard: Shard,
    windows: Sequence[int],
    dtype: torch.dtype,
) -> AttentionBackend:
    module = import_module(f"radixgrove.worker.attention.{choice.value}")
    kind: type[AttentionBackend] = getattr(module, _CLASSES[choice])
    return kind(
        pool,
        num_heads=shard.split(config.attention.heads)[1],
        num_kv_heads=shard.split(config.attention.kv_heads)[1],
        head_dim=config.attention.head_dim,
        scale=config.attention.scale,
        dtype=dtype,
        windows=windows,
    )
