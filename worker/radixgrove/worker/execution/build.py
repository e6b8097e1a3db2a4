"""One rank, from settings and a model directory: load, size, warm up, capture, measure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.config import ModelConfig
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.model.projections import unused_ignores
from radixgrove.protocol.model.quantization import MXFP4
from radixgrove.protocol.model.split import check_divides
from radixgrove.protocol.settings import LoadFormat, Transport, WorkerSettings
from radixgrove.service import machine
from radixgrove.worker.attention.kv_pool import KvShape
from radixgrove.worker.execution.assembly import LoadedModel, Report
from radixgrove.worker.execution.choices import (
    Limits,
    check_transport,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_length,
    choose_quantization,
    fit_length,
)
from radixgrove.worker.execution.host_room import GIB
from radixgrove.worker.execution.loading import load_model
from radixgrove.worker.execution.memory import (
    MemoryShortage,
    WindowSizing,
    check_weights,
    cpu_kv_tokens,
    cuda_kv_tokens,
    cuda_shortage,
    describe,
    host_tier_pages,
    kv_shape,
)
from radixgrove.worker.execution.openmp_waits import follow_load
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.trial import measure_cuda
from radixgrove.worker.execution.warmup import measure_prefill, rehearse_decodes
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.formats.choose import choose_formats
from radixgrove.worker.models.stages import Stage, split_layers
from radixgrove.worker.models.weights import check_size
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.member import Member, limit_collectives

log = logging.getLogger(__name__)

Form = Callable[[torch.device], Member]


def build_rank(
    settings: WorkerSettings,
    model_dir: Path,
    report: Report,
    rank: int = 0,
    form: Form | None = None,
) -> tuple[Runner, EngineInfo]:
    """One rank's runner; every rank runs this, since loading and warm-up hold collectives.

    Args:
        form: joins torch's groups, when all ranks are there; None: its member has no other rank.

    Raises:
        ModelError: the model, or the settings for it, cannot be served; the message says why.
    """
    config = load_config(model_dir)
    check_divides(config, settings.tp, settings.ep)
    if rank == 0 and (unused := unused_ignores(config)):
        log.warning(
            "quantization_config: ignore %s matches no projection of the model", ", ".join(unused)
        )
    layout = Layout.of(settings)
    place = layout.place(rank)
    shared = settings.transport is Transport.GLOO
    device = choose_device(settings.device, place.local_rank, shared=shared)
    layers = split_layers(config, settings.pp, settings.pp_layers, on_cpu=device.type == "cpu")
    check_transport(settings, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # torch knows the processor's cores, not the quota of a container.
        each = min(torch.get_num_threads(), machine.cores()) // layout.ranks_per_node
        threads = settings.cpu_threads or max(1, each)
        torch.set_num_threads(threads)
    follow_load(settings, torch.get_num_threads())
    member = form(device) if form is not None else Member(layout, rank)
    stage = Stage.of(place.stage, layers)
    try:
        return _build(settings, config, model_dir, report, device, member, stage)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryShortage(cuda_shortage(device, "to start")) from error


def _build(
    settings: WorkerSettings,
    config: ModelConfig,
    model_dir: Path,
    report: Report,
    device: torch.device,
    member: Member,
    stage: Stage,
) -> tuple[Runner, EngineInfo]:
    dtype = choose_dtype(settings.dtype, config, device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype, device)
    quantization = choose_quantization(settings.quantize, config, device)
    if settings.load_format != LoadFormat.DUMMY:
        check_size(config, model_dir)
    # On a CPU quantized numbers are widened; MXFP4 is on any device.
    narrow = quantization is not None and quantization.method != MXFP4 and device.type == "cuda"
    check_weights(config, 1 if narrow else dtype.itemsize, device, settings.tp * settings.pp)
    formats = choose_formats(quantization)
    place = TensorPlacement(
        member.tensor, dtype, device, formats, settings.ep, kv_scaled=kv_dtype == FLOAT8
    )
    shard, page_size = member.tensor.shard, settings.page_size
    shape = kv_shape(config, page_size, kv_dtype, shard, stage.layers)
    memory = _host_memory(settings, shape, member, device)
    try:
        limits = Limits.of(settings, device)
        model = load_model(settings, config, limits, model_dir, place, shape, stage, report)
        return _start(LoadedModel(settings, config, limits, model, member, shape, memory, report))
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def _host_memory(
    settings: WorkerSettings, shape: KvShape, member: Member, device: torch.device
) -> HostMemory | None:
    """Memory of the host tier, as many pages on every rank; on CUDA it is not ready yet."""
    layout = member.layout
    # Every rank has looked at what is free before one of them takes any of it.
    pages = member.minimum(host_tier_pages(settings, shape, layout.size, layout.ranks_per_node))
    if not pages:
        return None
    return HostMemory(pages * shape.page_bytes, shape.page_bytes, device)


def _start(loaded: LoadedModel) -> tuple[Runner, EngineInfo]:
    """Size the pool, warm up, capture, measure."""
    _ready_memory(loaded)
    longest, kv_tokens, window_pages = _sizes(loaded)
    # On CUDA the trial has said already which attention backend it is.
    silent = loaded.model.device.type == "cuda"
    runner, backend = loaded.assemble(
        kv_tokens // loaded.settings.page_size,
        window_pages,
        longest,
        _nothing if silent else loaded.report,
        loaded.memory,
    )
    _capture(loaded, runner, backend)
    info = _measure(loaded, runner, backend, longest)
    limit_collectives(loaded.limits.step_timeout)
    return runner, info


def _ready_memory(loaded: LoadedModel) -> None:
    """That of the host tier, and what ranks share."""
    if loaded.memory is not None:
        # CUDA locks memory under locks of its own, which would distort what is measured below.
        locking = f"locking {loaded.memory.bytes.nbytes / GIB:.1f} GiB for the host tier"
        loaded.memory.wait(lambda done: loaded.say(EngineState.LOADING, locking, done))
    tensor, model = loaded.member.tensor, loaded.model
    sizes = loaded.config.hidden_size, model.dtype, loaded.limits.max_running
    if rows := tensor.use_peer_memory(*sizes):
        loaded.say(EngineState.WARMING_UP, f"all-reduce over peer memory up to {rows} tokens")
    if loaded.member.use_mail(model.device, loaded.limits.max_running, loaded.limits.depth):
        loaded.say(EngineState.WARMING_UP, "samples return to the first stage over peer memory")


def _sizes(loaded: LoadedModel) -> tuple[int, int, int]:
    """The longest request and the pool, in tokens, and its window pages; all are reported."""
    asked, model = loaded.settings.max_model_len, loaded.model
    longest = choose_length(asked, loaded.config)
    kv_tokens, window_pages = _pool_sizes(loaded, longest)
    fitting = fit_length(asked, longest, kv_tokens)
    if fitting < longest:
        shortened = (
            f"max_model_len {fitting:,}: the KV pool holds no more; the model's is {longest:,}"
        )
        loaded.say(EngineState.WARMING_UP, shortened)
        longest = fitting
    loaded.say(
        EngineState.WARMING_UP,
        describe(
            model.weights_bytes,
            loaded.shape,
            kv_tokens,
            longest,
            loaded.member.layout.size,
            loaded.host_pages,
            model.expert_bytes,
            model.quantized_bytes,
            window_pages,
        ),
    )
    return longest, kv_tokens, window_pages


def _capture(loaded: LoadedModel, runner: Runner, backend: str) -> None:
    """Graphs of what steps repeat, where the device has them."""

    def say_captured(text: str, done: float) -> None:
        loaded.say(EngineState.CAPTURING, text, done)

    batches, steps = loaded.graph_sizes(backend)
    if batches:
        runner.capture(batches, say_captured)
    # Before small steps with chunks have graphs that large ones lack.
    if loaded.model.device.type == "cuda":
        rehearse_decodes(runner, loaded.limits.max_step_tokens)
    if steps:
        runner.capture_mixed(steps, say_captured)


def _measure(loaded: LoadedModel, runner: Runner, backend: str, longest: int) -> EngineInfo:
    """How fast it is, and all else that a worker says of its engine."""
    model, member = loaded.model, loaded.member
    device = model.device
    # Stages work on several steps at once: the slowest sets the pace.
    speed = measure_prefill(runner, loaded.limits.max_step_tokens, device)
    speed = float(member.minimum(int(speed))) if member.stages > 1 else speed
    host_speed = runner.measure_host()
    if runner.expert_load is not None:
        runner.expert_load.clear()
    return EngineInfo(
        num_pages=runner.info.num_pages,
        page_size=loaded.settings.page_size,
        max_model_len=longest,
        max_running=loaded.limits.max_running,
        vocab_size=loaded.config.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=loaded.shape.bytes_per_token,
        attention_backend=backend,
        prefill_tokens_per_second=speed,
        kv_dtype=loaded.shape.dtype_name,
        host_pages=loaded.host_pages,
        host_tokens_per_second=host_speed,
        num_window_pages=runner.info.num_window_pages,
        window_bytes_per_token=loaded.shape.window_bytes_per_token,
    )


def _nothing(phase: PhaseReport) -> None:
    """Drops a report that the trial has made."""


def _pool_sizes(loaded: LoadedModel, longest: int) -> tuple[int, int]:
    """Tokens of the pool and its window pages, the same on every rank."""
    settings, member, windows = loaded.settings, loaded.member, loaded.windows
    measured = _measured_room(loaded, longest)
    tokens, stage = member.least(measured(windows))
    window_pages = 0 if windows is None else windows.beside(tokens // settings.page_size)
    if windows is not None and settings.kv_tokens is None:
        # Window pages are for more tokens, which there may be no need or no room for.
        all_kept, stage_then = member.least(measured(None))
        if not window_pages or tokens <= all_kept:
            tokens, stage, window_pages = all_kept, stage_then, 0
    if member.stages > 1:
        bound = f"stage {stage} bounds the KV pool: {tokens:,} tokens"
        loaded.say(EngineState.WARMING_UP, bound)
    return tokens, window_pages


def _measured_room(loaded: LoadedModel, longest: int) -> Callable[[WindowSizing | None], int]:
    """From what layers with a window keep to the tokens of this rank's pool."""
    settings, shape, member = loaded.settings, loaded.shape, loaded.member
    wanted = loaded.limits.max_running * longest
    if loaded.model.device.type == "cuda":
        use = measure_cuda(loaded, longest)
        # More than one only where ranks share devices.
        sharing = -(-member.layout.ranks_per_node // torch.cuda.device_count())
        return partial(cuda_kv_tokens, settings, shape, use, wanted, sharing)
    local = member.layout.ranks_per_node
    return partial(cpu_kv_tokens, settings, shape, wanted, local, loaded.host_pages)
