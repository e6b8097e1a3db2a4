"""Choosing an attention backend: the fastest one that works here, said once with the reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.settings import AttentionChoice
from radixgrove.worker.attention.base import AttentionBackend, GroupBackend
from radixgrove.worker.attention.grouped import GroupedAttention
from radixgrove.worker.attention.kv_pool import KvGroup, KvPool
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
    pool: KvPool,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    report: Callable[[PhaseReport], None],
) -> tuple[AttentionBackend, str]:
    """The backend for a model of `dtype`, and its name.

    `auto` tries flashinfer, triton, torch in this order on CUDA, and takes torch on a CPU. Layers
    with a window have triton's where others have flashinfer's, set or not, and so have all of a
    model with sinks. Where that leaves flashinfer no layers, the backend is triton.

    Raises:
        ModelError: the chosen backend cannot be used here.
    """
    on_cuda = pool.device.type == "cuda"
    if choice != AttentionChoice.AUTO:
        if choice != AttentionChoice.TORCH and not on_cuda:
            raise ModelError(f"attention backend {choice.value} needs CUDA")
        why = "as set"
        if choice is AttentionChoice.FLASHINFER and not _has_flashinfer(pool, config):
            choice, why = AttentionChoice.TRITON, "for sinks and windows, though flashinfer is set"
        try:
            backend = _create(choice, pool, config, shard, dtype)
            _warm_up(backend, report)
        except (ImportError, RuntimeError) as error:
            raise ModelError(f"attention backend {choice.value}: {error}") from error
        report(_chosen(choice, backend, [why]))
        return backend, choice.value
    reasons = []
    for candidate in _candidates(pool, config):
        try:
            backend = _create(candidate, pool, config, shard, dtype)
            _warm_up(backend, report)
        except (ImportError, RuntimeError, ValueError) as error:
            reasons.append(f"{candidate.value} not usable: {error}")
            continue
        reasons.append("the fastest here" if on_cuda else "the backend for CPUs")
        report(_chosen(candidate, backend, reasons))
        return backend, candidate.value
    raise ModelError(f"no attention backend works: {'; '.join(reasons)}")


def _candidates(pool: KvPool, config: ModelConfig) -> list[AttentionChoice]:
    """What `auto` tries; flashinfer only where a group of layers would have it."""
    if pool.device.type != "cuda":
        return [AttentionChoice.TORCH]
    if _has_flashinfer(pool, config):
        return list(_PREFERENCE)
    return [choice for choice in _PREFERENCE if choice is not AttentionChoice.FLASHINFER]


def _has_flashinfer(pool: KvPool, config: ModelConfig) -> bool:
    """Whether a group of layers may have it."""
    return any(_takes_flashinfer(group, config) for group in pool.shape.groups)


def _takes_flashinfer(group: KvGroup, config: ModelConfig) -> bool:
    return not (group.window or config.attention.sinks)


def _chosen(choice: AttentionChoice, backend: AttentionBackend, why: list[str]) -> PhaseReport:
    said = "; ".join([*why, *filter(None, [backend.about])])
    return PhaseReport(EngineState.WARMING_UP, f"attention backend {choice.value} ({said})")


def _warm_up(backend: AttentionBackend, report: Callable[[PhaseReport], None]) -> None:
    backend.warm_up(lambda text, done: report(PhaseReport(EngineState.WARMING_UP, text, done)))


def _create(
    choice: AttentionChoice,
    pool: KvPool,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
) -> AttentionBackend:
    backends = [
        _group_backend(choice, group, tensor, config, shard, dtype)
        for group, tensor in zip(pool.shape.groups, pool.tensors, strict=True)
    ]
    if len(backends) == 1 and not pool.num_window_pages:
        return backends[0]
    return GroupedAttention(pool, backends)


def _group_backend(
    choice: AttentionChoice,
    group: KvGroup,
    pool: Tensor,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
) -> GroupBackend:
    if choice is AttentionChoice.FLASHINFER and not _takes_flashinfer(group, config):
        choice = AttentionChoice.TRITON
    module = import_module(f"radixgrove.worker.attention.{choice.value}")
    kind: type[GroupBackend] = getattr(module, _CLASSES[choice])
    return kind(
        pool,
        num_heads=shard.split(config.attention.heads)[1],
        num_kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        scale=config.attention.scale,
        dtype=dtype,
        window=group.window,
        sinks=config.attention.sinks,
    )
