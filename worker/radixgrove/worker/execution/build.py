"""From settings and a model directory to an executor that takes plans."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from radixgrove.kernels import ops as kernels
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.settings import AttentionBackend as Backend
from radixgrove.protocol.settings import Device, DType, KVDType, LoadFormat, WorkerSettings
from radixgrove.worker.execution.attention.ahead import AttentionShape, compile_jobs
from radixgrove.worker.execution.attention.select import select_attention
from radixgrove.worker.execution.graphs import Report as CaptureReport
from radixgrove.worker.execution.graphs import ladder
from radixgrove.worker.execution.host import host_tier, staging_bytes
from radixgrove.worker.execution.memory import (
    GIB,
    CudaUse,
    KvShape,
    MemoryShortage,
    cpu_kv_tokens,
    cuda_kv_tokens,
    cuda_shortage,
    describe,
    host_tier_pages,
)
from radixgrove.worker.execution.mixed import token_ladder
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.warmup import (
    exercise,
    measure_prefill,
    rehearse_decodes,
    trial_pages,
)
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.models.config import ModelConfig, ModelError, load_config
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.layers import Placement
from radixgrove.worker.models.ops import choose_ops
from radixgrove.worker.models.weights import fill_random, load_safetensors
from radixgrove.worker.parallel.group import Shard, TensorParallel
from radixgrove.worker.parallel.rendezvous import check_divides, join, limit_collectives
from radixgrove.worker.plan import Executor, ExecutorInfo

Report = Callable[[PhaseReport], None]
Capture = Callable[[list[int], CaptureReport], object]
# From here on (Ada, Hopper) the kernels have instructions that convert float8.
_FLOAT8_CAPABILITY = (8, 9)
# A CPU's step is this much slower than a GPU's before it counts as stuck.
_CPU_STEP_FACTOR = 12.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings whose default depends on the device."""

    max_running: int
    max_step_tokens: int
    depth: int
    step_timeout: float

    @classmethod
    def of(cls, settings: WorkerSettings, device: torch.device) -> Limits:
        cuda = device.type == "cuda"
        return cls(
            max_running=settings.max_running or (256 if cuda else 32),
            max_step_tokens=settings.max_step_tokens or (8192 if cuda else 512),
            depth=2 if cuda and settings.overlap else 1,
            step_timeout=settings.step_timeout * (1.0 if cuda else _CPU_STEP_FACTOR),
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A rank's model and all that is known before the pool is sized."""

    settings: WorkerSettings
    config: ModelConfig
    limits: Limits
    model: Decoder
    shape: KvShape
    memory: HostMemory | None  # of the host tier
    report: Report

    @property
    def host_pages(self) -> int:
        return 0 if self.memory is None else self.memory.bytes.nbytes // self.shape.page_bytes

    def say(self, state: EngineState, message: str, fraction: float | None = None) -> None:
        self.report(PhaseReport(state, message, fraction))

    def assemble(
        self, num_pages: int, max_model_len: int, report: Report, memory: HostMemory | None
    ) -> tuple[Runner, str]:
        """A runner on a pool of `num_pages`, and its attention backend's name.

        Args:
            memory: for its host tier; None: it has none.
        """
        settings, device = self.settings, self.model.device
        info = ExecutorInfo(
            num_pages=num_pages,
            page_size=settings.page_size,
            max_rows=self.limits.max_running,
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
            depth=self.limits.depth,
            num_host_pages=0 if memory is None else self.host_pages,
        )
        pool = self.shape.allocate(num_pages, device)
        attention, name = select_attention(
            settings.attention_backend,
            pool,
            self.config,
            self.model.group.shard,
            self.model.dtype,
            report,
        )
        table = RequestTable(
            max_rows=info.max_rows,
            max_model_len=max_model_len,
            page_size=settings.page_size,
            scratch_page=num_pages,
            device=device,
        )
        host = None if memory is None else host_tier(pool, memory)
        timeout = self.limits.step_timeout
        return Runner(self.model, attention, table, info, timeout, host), name

    def graph_sizes(self, backend: str) -> tuple[list[int], list[int]]:
        """Batch sizes and token counts to capture: none on a CPU, or for the backend whose shapes
        vary."""
        on_cuda = self.model.device.type == "cuda"
        if not on_cuda or not self.settings.cuda_graphs or backend == Backend.TORCH:
            return [], []
        return ladder(self.limits.max_running), token_ladder(self.limits.max_step_tokens)


def build_executor(
    settings: WorkerSettings,
    model_dir: Path,
    report: Report,
    runtime_dir: Path | None = None,
) -> tuple[Executor, EngineInfo]:
    """Rank 0's executor: load the model, size the pool, warm up, capture.

    Args:
        runtime_dir: where the ranks meet; needed when `settings.tp` is more than 1.

    Raises:
        ModelError: the model, or the settings for it, cannot be served; the message says why.
        RankMissing: another rank did not come.
    """
    runner, info = build_rank(settings, model_dir, report, runtime_dir, rank=0)
    if settings.tp == 1 or runtime_dir is None:
        return runner, info
    from radixgrove.worker.parallel.leader import GroupExecutor, PlanLinks

    links = PlanLinks(runtime_dir, settings.tp, runner.info.depth, settings.step_timeout)
    return GroupExecutor(runner, links), info


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
    elif settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    elif settings.tp > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.tp))
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
    place = Placement(group, dtype, device)
    shape = KvShape.of(config, settings.page_size, kv_dtype, group.shard)
    memory = _host_memory(settings, shape, place)
    try:
        limits = Limits.of(settings, device)
        model = load_model(settings, config, limits, model_dir, place, kv_dtype, report)
        return _start(_Loaded(settings, config, limits, model, shape, memory, report))
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def _host_memory(settings: WorkerSettings, shape: KvShape, place: Placement) -> HostMemory | None:
    """Memory of the host tier, the same on every rank; on CUDA it is not ready yet."""
    # Every rank has looked at what is free before one of them takes any of it.
    pages = place.group.minimum(host_tier_pages(settings, shape, place.group.size))
    if not pages:
        return None
    return HostMemory(pages * shape.page_bytes, shape.page_bytes, place.device)


def _start(loaded: _Loaded) -> tuple[Runner, EngineInfo]:
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
    """A report that nobody needs twice."""


def _kv_tokens(loaded: _Loaded, longest: int) -> int:
    """Tokens of the pool, the same on every rank."""
    settings, shape, group = loaded.settings, loaded.shape, loaded.model.group
    wanted = loaded.limits.max_running * longest
    if loaded.model.device.type == "cuda":
        tokens = cuda_kv_tokens(settings, shape, _measure_cuda(loaded, longest), wanted)
    else:
        tokens = cpu_kv_tokens(settings, shape, wanted, group.size, loaded.host_pages)
    return group.minimum(tokens)


def _measure_cuda(loaded: _Loaded, longest: int) -> CudaUse:
    """Run the heaviest step and capture two graphs on a small pool, then throw it away."""
    device, limits = loaded.model.device, loaded.limits
    loaded.say(EngineState.WARMING_UP, "measuring memory with a trial step")
    kernels.tuner.tune(
        loaded.model.projections(),
        limits.max_running,
        limits.max_step_tokens,
        lambda text, done: loaded.say(EngineState.WARMING_UP, text, done),
    )
    weights = torch.cuda.memory_allocated(device)
    pages = trial_pages(limits.max_step_tokens, limits.max_running, loaded.settings.page_size)
    runner, backend = loaded.assemble(pages, longest, loaded.report, memory=None)
    pool = loaded.shape.allocated_bytes(pages)
    torch.cuda.reset_peak_memory_stats(device)
    exercise(runner, limits.max_step_tokens)
    activations = torch.cuda.max_memory_allocated(device) - weights - pool
    graphs = 0
    batches, steps = loaded.graph_sizes(backend)
    if batches:
        graphs += _graph_bytes(runner.capture, batches, device)
    if steps:
        graphs += _graph_bytes(runner.capture_mixed, steps, device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    if loaded.memory is not None:
        other += staging_bytes(loaded.shape.page_bytes)
    return CudaUse(total, weights, activations, graphs, other)


def _graph_bytes(capture: Capture, sizes: list[int], device: torch.device) -> int:
    """What capturing all of `sizes` takes: static buffers (a float32 row of logits for each row of
    a batch is much of it) with the largest one, and the rest each like the second."""
    torch.cuda.empty_cache()
    free = []

    def note(*_: object) -> None:
        free.append(torch.cuda.mem_get_info(device)[0])

    note()
    capture(sizes[-2:], note)  # notes before each
    note()
    first, others = free[0] - free[2], free[2] - free[-1]
    return max(0, first) + max(0, others) * (len(sizes) - 1)


def choose_device(setting: Device, rank: int) -> torch.device:
    """This rank's device.

    Raises:
        ModelError: CUDA is asked for and absent, or there are fewer devices than ranks.
    """
    if setting == Device.CPU or (setting == Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("device cuda asked for, but torch finds no CUDA device")
    if rank >= (count := torch.cuda.device_count()):
        raise ModelError(f"rank {rank} has no device: this machine has {count}; lower tp")
    return torch.device("cuda", rank)


def choose_dtype(setting: DType, config: ModelConfig, device: torch.device) -> torch.dtype:
    if setting != DType.AUTO:
        dtype: torch.dtype = getattr(torch, setting.value)
        return dtype
    return torch.float32 if device.type == "cpu" else config.dtype


def choose_kv_dtype(setting: KVDType, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The pool's dtype, for a model of `dtype`.

    Raises:
        ModelError: the device cannot convert float8.
    """
    if setting == KVDType.AUTO:
        return dtype
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FLOAT8_CAPABILITY:
            raise ModelError(
                f"kv_dtype {setting.value} needs a GPU of compute capability 8.9 or later, and "
                f"this one has {capability[0]}.{capability[1]}; set kv_dtype to auto"
            )
    return FLOAT8


def choose_length(setting: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if setting is not None and setting > longest:
        raise ModelError(f"max_model_len {setting} exceeds the model's {longest}")
    return setting or longest


def fit_length(setting: int | None, max_model_len: int, kv_tokens: int) -> int:
    """One request must fit the pool: shorten the default length, refuse an explicit one."""
    if max_model_len <= kv_tokens:
        return max_model_len
    if setting is not None:
        raise ModelError(
            f"max_model_len {setting} does not fit the KV pool of {kv_tokens} tokens; lower it, or "
            "raise kv_tokens or memory_fraction"
        )
    return kv_tokens


def load_model(
    settings: WorkerSettings,
    config: ModelConfig,
    limits: Limits,
    model_dir: Path,
    place: Placement,
    kv_dtype: torch.dtype,
    report: Report,
) -> Decoder:
    """The decoder with its weights, on the device; kernels compile meanwhile."""
    model = Decoder(config, place, choose_ops(place.device))
    sizes = limits.max_running, limits.max_step_tokens
    attention = []
    if place.device.type == "cuda":
        shape = attention_shape(settings, config, limits, place, kv_dtype)
        attention = compile_jobs(shape, place.device)
    with kernels.tuner.compiling(model.projections(), *sizes, attention):
        if settings.load_format == LoadFormat.DUMMY:
            report(PhaseReport(EngineState.LOADING, "filling random weights"))
            fill_random(model.parts(), seed=place.group.rank)
        else:
            load_safetensors(
                model.parts(),
                model_dir,
                lambda done: report(PhaseReport(EngineState.LOADING, "loading weights", done)),
            )
    model.prepare()
    return model


def attention_shape(
    settings: WorkerSettings,
    config: ModelConfig,
    limits: Limits,
    place: Placement,
    kv_dtype: torch.dtype,
) -> AttentionShape:
    longest = choose_length(settings.max_model_len, config)
    return AttentionShape(
        heads=place.group.shard.split(config.num_heads)[1],
        kv_heads=place.group.shard.split(config.num_kv_heads)[1],
        head_dim=config.head_dim,
        page_size=settings.page_size,
        max_rows=limits.max_running,
        max_pages=-(-longest // settings.page_size),
        qk_norm=config.qk_norm,
        dtype=place.dtype,
        kv_dtype=kv_dtype,
        extends=settings.attention_backend == Backend.TRITON
        or kv_dtype == FLOAT8
        or find_spec("flashinfer") is None,
    )
