"""From settings and a model directory to an executor that takes plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from radixgrove.protocol.settings import Device, DType, LoadFormat, WorkerSettings
from radixgrove.worker.execution.attention.select import select_attention
from radixgrove.worker.execution.memory import KvShape, cpu_kv_tokens, describe
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.warmup import measure_prefill
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.models.config import ModelConfig, ModelError, load_config
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.layers import Placement
from radixgrove.worker.models.ops import TorchOps
from radixgrove.worker.models.weights import fill_random, load_safetensors
from radixgrove.worker.parallel.group import Shard, TensorParallel
from radixgrove.worker.plan import Executor, ExecutorInfo

Report = Callable[[PhaseReport], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings whose default depends on the device."""

    max_running: int
    max_step_tokens: int
    depth: int

    @classmethod
    def of(cls, settings: WorkerSettings, device: torch.device) -> Limits:
        cuda = device.type == "cuda"
        return cls(
            max_running=settings.max_running or (256 if cuda else 32),
            max_step_tokens=settings.max_step_tokens or (8192 if cuda else 512),
            depth=2 if cuda and settings.overlap else 1,
        )


def build_executor(
    settings: WorkerSettings, model_dir: Path, report: Report
) -> tuple[Executor, EngineInfo]:
    """Load the model, size the pool, warm up.

    Raises:
        ModelError: the model, or the settings for it, cannot be served; the message says why.
    """
    device = choose_device(settings.device, rank=0)
    config = load_config(model_dir)
    dtype = choose_dtype(settings.dtype, config, device)
    max_model_len = choose_length(settings.max_model_len, config)
    limits = Limits.of(settings, device)
    group = TensorParallel(Shard())
    if device.type == "cpu" and settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    model = load_model(settings, config, model_dir, Placement(group, dtype, device), report)
    shape = KvShape.of(config, settings.page_size, dtype, group.shard)
    wanted = limits.max_running * max_model_len
    kv_tokens = cpu_kv_tokens(settings, shape, wanted, group.size)
    max_model_len = fit_length(settings.max_model_len, max_model_len, kv_tokens)
    weights = model.weights_bytes()
    report(
        PhaseReport(
            EngineState.WARMING_UP,
            describe(weights, shape, kv_tokens, max_model_len, group.size),
        )
    )
    info = ExecutorInfo(
        num_pages=kv_tokens // settings.page_size,
        page_size=settings.page_size,
        max_rows=limits.max_running,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        depth=limits.depth,
    )
    pool = shape.allocate(info.num_pages, device)
    attention, name = select_attention(
        settings.attention_backend, pool, config, group.shard, report
    )
    table = RequestTable(
        max_rows=info.max_rows,
        max_model_len=max_model_len,
        page_size=settings.page_size,
        scratch_page=info.num_pages,
        device=device,
    )
    runner = Runner(model, attention, table, info)
    speed = measure_prefill(runner, limits.max_step_tokens, device)
    return runner, EngineInfo(
        num_pages=info.num_pages,
        page_size=info.page_size,
        max_model_len=max_model_len,
        max_running=limits.max_running,
        vocab_size=config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        weights_bytes=weights,
        kv_bytes_per_token=shape.bytes_per_token,
        attention_backend=name,
        prefill_tokens_per_second=speed,
    )


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
    model_dir: Path,
    place: Placement,
    report: Report,
) -> Decoder:
    """The decoder with its weights, on the device."""
    model = Decoder(config, place, TorchOps())
    if settings.load_format == LoadFormat.DUMMY:
        report(PhaseReport(EngineState.LOADING, "filling random weights"))
        fill_random(model.parts(), seed=place.group.rank)
    else:
        load_safetensors(
            model.parts(),
            model_dir,
            lambda done: report(PhaseReport(EngineState.LOADING, "loading weights", done)),
        )
    return model
