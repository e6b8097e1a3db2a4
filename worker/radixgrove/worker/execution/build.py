"""One rank, from settings and a model directory: load, size, warm up, capture, measure."""

from __future__ import annotations

from pathlib import Path

import torch

from radixgrove.protocol.model.config import ModelConfig, check_divides
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import machine
from radixgrove.worker.execution.assembly import LoadedModel, Report
from radixgrove.worker.execution.choices import (
    Limits,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_length,
    fit_length,
)
from radixgrove.worker.execution.loading import load_model
from radixgrove.worker.execution.memory import (
    GIB,
    KvShape,
    MemoryShortage,
    cpu_kv_tokens,
    cuda_kv_tokens,
    cuda_shortage,
    describe,
    host_tier_pages,
)
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.trial import measure_cuda
from radixgrove.worker.execution.warmup import measure_prefill, rehearse_decodes
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.models.layers import TensorPlacement
from radixgrove.worker.parallel.group import Shard, TensorParallel
from radixgrove.worker.parallel.rendezvous import join, limit_collectives


def build_rank(
    settings: WorkerSettings,
    model_dir: Path,
    report: Report,
    runtime_dir: Path | None,
    rank: int,
) -> tuple[Runner, EngineInfo]:
    """One rank's runner; every rank runs this, since loading and warm-up hold collectives."""
    config = load_config(model_dir)
    check_divides(config, settings.tp)
    device = choose_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # torch knows the processor's cores, not the quota of a container.
        shared = min(torch.get_num_threads(), machine.cores()) // settings.tp
        torch.set_num_threads(settings.cpu_threads or max(1, shared))
    group = TensorParallel(Shard())
    if settings.tp > 1:
        if runtime_dir is None:
            raise ValueError("several ranks need a runtime directory to meet in")
        group = join(runtime_dir, Shard(rank, settings.tp), device)
    try:
        return _build(settings, config, model_dir, report, device, group)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryShortage(cuda_shortage(device, "to start")) from error


def _build(
    settings: WorkerSettings,
    config: ModelConfig,
    model_dir: Path,
    report: Report,
    device: torch.device,
    group: TensorParallel,
) -> tuple[Runner, EngineInfo]:
    dtype = choose_dtype(settings.dtype, config, device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype, device)
    place = TensorPlacement(group, dtype, device)
    shape = KvShape.of(config, settings.page_size, kv_dtype, group.shard)
    memory = _host_memory(settings, shape, place)
    try:
        limits = Limits.of(settings, device)
        model = load_model(settings, config, limits, model_dir, place, kv_dtype, report)
        return _start(LoadedModel(settings, config, limits, model, shape, memory, report))
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def _host_memory(
    settings: WorkerSettings, shape: KvShape, place: TensorPlacement
) -> HostMemory | None:
    """Memory of the host tier, the same on every rank; on CUDA it is not ready yet."""
    # Every rank has looked at what is free before one of them takes any of it.
    pages = place.group.minimum(host_tier_pages(settings, shape, place.group.size))
    if not pages:
        return None
    return HostMemory(pages * shape.page_bytes, shape.page_bytes, place.device)


def _start(loaded: LoadedModel) -> tuple[Runner, EngineInfo]:
    """Size the pool, warm up, capture, measure."""
    settings, config, model = loaded.settings, loaded.config, loaded.model
    device, group = model.device, model.group
    if loaded.memory is not None:
        # CUDA locks memory under locks of its own, which would distort what is measured below.
        locking = f"locking {loaded.memory.bytes.nbytes / GIB:.1f} GiB for the host tier"
        loaded.memory.wait(lambda done: loaded.say(EngineState.LOADING, locking, done))
    if rows := group.use_peer_memory(config.hidden_size, model.dtype):
        loaded.say(EngineState.WARMING_UP, f"all-reduce over peer memory up to {rows} tokens")
    longest = choose_length(settings.max_model_len, config)
    kv_tokens = _kv_tokens(loaded, longest)
    fitting = fit_length(settings.max_model_len, longest, kv_tokens)
    if fitting < longest:
        shortened = (
            f"max_model_len {fitting:,}: the KV pool holds no more; the model's is {longest:,}"
        )
        loaded.say(EngineState.WARMING_UP, shortened)
        longest = fitting
    weights = model.weights_bytes
    loaded.say(
        EngineState.WARMING_UP,
        describe(weights, loaded.shape, kv_tokens, longest, group.size, loaded.host_pages),
    )
    # On CUDA the trial has said already which attention backend it is.
    silent = device.type == "cuda"
    runner, backend = loaded.assemble(
        kv_tokens // settings.page_size,
        longest,
        _nothing if silent else loaded.report,
        loaded.memory,
    )

    def say_captured(text: str, done: float) -> None:
        loaded.say(EngineState.CAPTURING, text, done)

    batches, steps = loaded.graph_sizes(backend)
    if batches:
        runner.capture(batches, say_captured)
    if device.type == "cuda":  # before small steps with chunks have graphs that large ones lack
        rehearse_decodes(runner, loaded.limits.max_step_tokens)
    if steps:
        runner.capture_mixed(steps, say_captured)
    speed = measure_prefill(runner, loaded.limits.max_step_tokens, device)
    host_speed = runner.measure_host()
    limit_collectives(group, loaded.limits.step_timeout)
    return runner, EngineInfo(
        num_pages=runner.info.num_pages,
        page_size=settings.page_size,
        max_model_len=longest,
        max_running=loaded.limits.max_running,
        vocab_size=config.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        weights_bytes=weights,
        kv_bytes_per_token=loaded.shape.bytes_per_token,
        attention_backend=backend,
        prefill_tokens_per_second=speed,
        kv_dtype=loaded.shape.dtype_name,
        host_pages=loaded.host_pages,
        host_tokens_per_second=host_speed,
    )


def _nothing(phase: PhaseReport) -> None:
    """Drops a report that the trial has made."""


def _kv_tokens(loaded: LoadedModel, longest: int) -> int:
    """Tokens of the pool, the same on every rank."""
    settings, shape, group = loaded.settings, loaded.shape, loaded.model.group
    wanted = loaded.limits.max_running * longest
    if loaded.model.device.type == "cuda":
        tokens = cuda_kv_tokens(settings, shape, measure_cuda(loaded, longest), wanted)
    else:
        tokens = cpu_kv_tokens(settings, shape, wanted, group.size, loaded.host_pages)
    return group.minimum(tokens)
