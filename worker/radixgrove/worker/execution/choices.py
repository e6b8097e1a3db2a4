"""Settings that depend on the device or the model: chosen once; a refusal names the remedy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.fit import check_length, quantization_of
from radixgrove.protocol.model.quantization import Numbers, Quantization
from radixgrove.protocol.settings import (
    CPU_STEP_SLACK,
    Device,
    DType,
    KVDType,
    Quantize,
    Transport,
    WorkerSettings,
)
from radixgrove.worker.parallel.layout import lacks_device

# From here on (Ada, Hopper) the kernels have instructions that convert float8.
_FLOAT8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings with a default that depends on the device."""

    max_running: int
    max_step_tokens: int
    depth: int
    micro_batches: int
    step_timeout: float

    @classmethod
    def of(cls, settings: WorkerSettings, device: torch.device) -> Limits:
        cuda = device.type == "cuda"
        depth = 2 if cuda and settings.overlap else 1
        return cls(
            *settings.step_limits(on_cpu=not cuda),
            # A step for each stage, and one that has its results on the host, or is of prompts.
            depth=settings.pp + 1 if settings.pp > 1 else depth,
            # One more would keep the stages busy while results are on the host, and every step of
            # all rows would read the weights once more, which takes longer.
            micro_batches=settings.pp,
            step_timeout=settings.step_timeout * (1.0 if cuda else CPU_STEP_SLACK),
        )


def choose_device(setting: Device, local_rank: int, *, shared: bool = False) -> torch.device:
    """The device of a rank.

    Args:
        local_rank: the rank within its machine.
        shared: ranks may share a device, where there are fewer.

    Raises:
        ModelError: CUDA is asked for and absent, or there are fewer devices than ranks.
    """
    if setting == Device.CPU or (setting == Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("device cuda asked for, but torch finds no CUDA device")
    count = torch.cuda.device_count()
    if not shared and (why := lacks_device(local_rank, count)):
        raise ModelError(why)
    return torch.device("cuda", local_rank % count)


def check_transport(settings: WorkerSettings, device: torch.device) -> None:
    """Raises ModelError: ranks would sum over a transport that has no sums between GPUs."""
    if device.type == "cuda" and settings.transport is Transport.GLOO and settings.tp > 1:
        raise ModelError(
            f"transport gloo carries the activations of stages alone, and tp {settings.tp} sums "
            "between GPUs: leave transport at auto, or tp at 1"
        )


def choose_dtype(setting: DType, config: ModelConfig, device: torch.device) -> torch.dtype:
    name = setting.value
    if setting == DType.AUTO:
        name = "float32" if device.type == "cpu" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_quantization(
    setting: Quantize, config: ModelConfig, device: torch.device
) -> Quantization | None:
    """Of the model's projections; None: they are not quantized.

    Raises:
        ModelError: the checkpoint is quantized and is to be so anew, or the device has no float8.
    """
    quantization = quantization_of(config, setting)
    float8 = quantization is not None and any(
        scheme.numbers is Numbers.FLOAT8 for scheme in quantization.schemes()
    )
    if quantization is not None and float8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FLOAT8_CAPABILITY:
            remedy = "set quantize to none" if config.quantization is None else "use another model"
            raise ModelError(
                f"weights in float8 ({quantization.method}) need a GPU of compute capability 8.9 "
                f"or later, and this one has {capability[0]}.{capability[1]}; {remedy}"
            )
    return quantization


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
    check_length(config, setting)
    return setting or config.max_position_embeddings


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
