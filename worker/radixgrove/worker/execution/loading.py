"""Weights onto the device, while the kernels that the model will want are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from radixgrove.kernels import ops as kernels
from radixgrove.kernels.compilers import Room
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.config import ModelConfig, QkNorm
from radixgrove.protocol.model.directory import known_tokens
from radixgrove.protocol.settings import AttentionChoice, LoadFormat, WorkerSettings
from radixgrove.service import machine
from radixgrove.worker.attention.flashinfer_kernels import can_serve, import_flashinfer, kernel_of
from radixgrove.worker.attention.kv_pool import KvGroup, KvShape
from radixgrove.worker.attention.precompile import AttentionShape, compile_jobs
from radixgrove.worker.execution.assembly import Report
from radixgrove.worker.execution.choices import Limits, choose_length
from radixgrove.worker.execution.memory import WindowSizing
from radixgrove.worker.execution.precompile import step_jobs
from radixgrove.worker.messages import EngineState, PhaseReport
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.ops import choose_ops
from radixgrove.worker.models.stages import Stage
from radixgrove.worker.models.weights import fill_random, load_safetensors
from radixgrove.worker.parallel.layout import Layout


def load_model(
    settings: WorkerSettings,
    config: ModelConfig,
    limits: Limits,
    model_dir: Path,
    place: TensorPlacement,
    kv: KvShape,
    stage: Stage,
    report: Report,
) -> Decoder:
    """A stage of the decoder with its weights, on the device; kernels compile meanwhile."""
    ops = choose_ops(place.device, place.dtype)
    model = Decoder(config, place, ops, known_tokens(model_dir), stage)
    sizes = limits.max_running, limits.max_step_tokens
    others: list[Callable[[], object]] = []
    if place.device.type == "cuda":
        # One of these is compiled before all else may be, and takes the least time.
        longest = choose_length(settings.max_model_len, config)
        windows = WindowSizing.of(settings, config, limits) is not None
        others += step_jobs(model, longest, settings.page_size, windows=windows)
        shapes = attention_shapes(settings, config, limits, place, kv)
        if not all(shape.extends for shape in shapes):
            others.append(import_flashinfer)  # which takes a second or two
        for shape in shapes:
            shape = replace(shape, quantizes=model.quantizes_heads)
            others += compile_jobs(shape, place.device)
        others += kernels.expert_tuner.jobs(*model.experts(), limits.max_step_tokens)
    ranks = Layout.of(settings).ranks_per_node
    room = Room(machine.cores() // ranks, machine.free_memory() // ranks)
    with kernels.tuner.compiling(model.projections(), *sizes, room, others):
        if settings.load_format == LoadFormat.DUMMY:
            report(PhaseReport(EngineState.LOADING, "filling random weights"))
            fill_random(model.parts())
        else:
            load_safetensors(
                model.parts(),
                model_dir,
                lambda done: report(PhaseReport(EngineState.LOADING, "loading weights", done)),
                tied=config.tied_embeddings,
            )
    model.prepare()
    return model


def attention_shapes(
    settings: WorkerSettings,
    config: ModelConfig,
    limits: Limits,
    place: TensorPlacement,
    kv: KvShape,
) -> list[AttentionShape]:
    """Of each group of layers."""
    longest = choose_length(settings.max_model_len, config)
    return [
        AttentionShape(
            heads=place.group.shard.split(config.attention.heads)[1],
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            page_size=kv.page_size,
            max_rows=limits.max_running,
            max_pages=-(-longest // kv.page_size),
            qk_norm=config.attention.qk_norm is QkNorm.HEAD,
            dtype=place.dtype,
            kv_dtype=group.dtype,
            window=group.window,
            sinks=config.attention.sinks,
            extends=settings.attention_backend == AttentionChoice.TRITON
            or bool(group.window)
            or config.attention.sinks
            or group.dtype == FLOAT8
            or not _has_flashinfer(group, place),
        )
        for group in kv.groups
    ]


def _has_flashinfer(group: KvGroup, place: TensorPlacement) -> bool:
    """Whether `auto` finds FlashInfer's prefill, as far as can be seen without trying it."""
    major, _ = torch.cuda.get_device_capability(place.device)
    kernel = kernel_of(major, str(place.dtype).removeprefix("torch."), group.head_dim)
    return kernel is not None and can_serve(kernel)
