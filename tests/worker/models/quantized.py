"""Quantized checkpoints written as `compressed-tensors`, transformers and FBGEMM write them, and
what they stand for, computed apart from the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX = 448.0
Tensors = dict[str, Tensor]


def block_scales(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """The scale of each block: the largest value becomes float8's largest."""
    rows, columns = block
    return torch.stack(
        [
            torch.stack([part.abs().max() / MAX for part in band.split(columns, 1)])
            for band in matrix.split(rows)
        ]
    )


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for each place of the matrix."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def nearest(x: Tensor) -> Tensor:
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def rounded_inputs(x: Tensor, width: int | None, bound: float = float("inf")) -> Tensor:
    """x with the error of a dynamic quantization per row, or per part of a row."""
    parts = x.float().split(width or x.shape[1], 1)
    scales = [part.abs().amax(1, keepdim=True).clamp(max=bound) / MAX for part in parts]
    return torch.cat(
        [nearest(part / scale).float() * scale for part, scale in zip(parts, scales, strict=True)],
        1,
    )


@dataclass
class Kind:
    """A format: its config, and how it writes one matrix.

    Attributes:
        block: None: a scale per row (`channel`) or of the whole matrix.
        inputs: x as the format rounds it.
    """

    config: dict[str, Any]
    names: tuple[str, str] = ("weight_scale", "input_scale")
    channel: bool = False
    block: tuple[int, int] | None = None
    inputs: Callable[[Tensor], Tensor] = field(default=lambda x: x.float())
    input_scale: float | None = None
    exponents: bool = False
    column: bool = True  # scales of rows are saved as [N, 1]
    integers: bool = False

    def write(self, prefix: str, matrix: Tensor) -> Tensors:
        """The checkpoint's tensors of a projection."""
        block = self._block(matrix)
        scales = block_scales(matrix.float(), block)
        if self.integers:
            scales = scales * MAX / 127
        if self.exponents:
            scales = scales.log2().ceil().exp2()
        payload = matrix.float() / spread(scales, block, matrix.shape)
        payload = payload.round().to(torch.int8) if self.integers else nearest(payload)
        if self.exponents:
            scales = scales.to(torch.float8_e8m0fnu)
        elif self.block is None:
            scales = scales[:, 0] if self.channel else scales[0, 0]
            scales = scales[:, None] if self.channel and self.column else scales
        tensors = {f"{prefix}.weight": payload, f"{prefix}.{self.names[0]}": scales}
        if self.input_scale is not None:
            tensors[f"{prefix}.{self.names[1]}"] = torch.tensor([self.input_scale])
        return tensors

    def stands_for(self, prefix: str, tensors: Tensors) -> Tensor:
        """The matrix that `write` has written, float32."""
        payload = tensors[f"{prefix}.weight"].float()
        scales = tensors[f"{prefix}.{self.names[0]}"].float()
        block = self._block(payload)
        return payload * spread(
            scales.reshape(-1, -(-payload.shape[1] // block[1])), block, payload.shape
        )

    def _block(self, matrix: Tensor) -> tuple[int, int]:
        if self.block is not None:
            return self.block
        return (1 if self.channel else matrix.shape[0], matrix.shape[1])


def _static(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: nearest(x.float() / scale).float() * scale


def per_row(x: Tensor) -> Tensor:
    return rounded_inputs(x, None)


def integer_inputs(x: Tensor, scale: float | None = None) -> Tensor:
    """x with the error of int8, of a scale a row where there is none."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True) / 127 if scale is None else torch.tensor(scale)
    return (wide / scales).round().clamp(-127, 127) * scales


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """As `compressed-tensors` 0.9 writes its part of a config.json."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    float8 |= {"actorder": None, "block_structure": None, "observer": "minmax"}
    float8["type"] = "int" if more.get("format") == "int-quantized" else "float"
    group = {
        "targets": ["Linear"],
        "weights": float8 | {"dynamic": False} | weights,
        "input_activations": None if inputs is None else float8 | inputs,
        "output_activations": None,
    }
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "sparsity_config": {},
    }
    return config | more


def kinds(block: int) -> dict[str, Kind]:
    """Every format, with blocks of this size where it has any."""
    square = block, block
    per_part: Callable[[Tensor], Tensor] = lambda x: rounded_inputs(x, block)  # noqa: E731
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
    inverse = "weight_scale_inv", "activation_scale"
    blocks = fp8 | {"weight_block_size": [block, block], "activation_scheme": "dynamic"}
    grouped = {"strategy": "group", "dynamic": True, "group_size": block}
    return {
        "fp8, tensor, dynamic": Kind(
            fp8 | {"weight_block_size": None, "activation_scheme": "dynamic"},
            inverse,
            inputs=per_row,
        ),
        "fp8, tensor, static": Kind(
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            inputs=_static(0.02),
            input_scale=0.02,
        ),
        "fp8, blocks": Kind(blocks, inverse, block=square, inputs=per_part),
        "fp8, blocks, powers of two": Kind(
            blocks | {"scale_fmt": "ue8m0"}, inverse, block=square, inputs=per_part, exponents=True
        ),
        "compressed, channel": Kind(
            compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
            channel=True,
            inputs=per_row,
        ),
        "compressed, tensor, static": Kind(
            compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
            inputs=_static(0.02),
            input_scale=0.02,
        ),
        "compressed, weights alone": Kind(
            compressed({"strategy": "channel"}, None, format="naive-quantized"), channel=True
        ),
        "compressed, blocks": Kind(
            compressed({"strategy": "block", "block_structure": [block, block]}, grouped),
            block=square,
            inputs=per_part,
        ),
        "int8, channel": Kind(
            compressed(
                {"strategy": "channel"},
                {"strategy": "token", "dynamic": True},
                format="int-quantized",
            ),
            channel=True,
            inputs=integer_inputs,
            integers=True,
        ),
        "int8, tensor, static": Kind(
            compressed(
                {"strategy": "tensor"},
                {"strategy": "tensor", "dynamic": False},
                format="int-quantized",
            ),
            inputs=lambda x: integer_inputs(x, 0.05),
            input_scale=0.05,
            integers=True,
        ),
        "fbgemm": Kind(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0},
            channel=True,
            inputs=lambda x: rounded_inputs(x, None, 2.0),
        ),
    }


def quantize(directory: Path, kind: Kind, keep: tuple[str, ...] = ()) -> Tensors:
    """Quantize the projections of the model in `directory`, but for those whose names end with one
    of `keep`; what its projections stand for then, by name."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    stands_for = {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        prefix = name.removesuffix(".weight")
        if prefix.endswith(keep):
            continue
        tensors |= kind.write(prefix, tensors[name])
        stands_for[prefix] = kind.stands_for(prefix, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    config = directory / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": kind.config})
    )
    return stands_for


def by_transformers(directory: Path, **options: Any) -> None:
    """Quantize the model in `directory` with transformers' own quantizer."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(**options)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=config))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors |= operation.convert({name: tensors[name]})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    file = directory / "config.json"
    written = {"quantization_config": config.to_dict()}
    file.write_text(json.dumps(json.loads(file.read_text()) | written))


def imitate(model: Any, kind: Kind, stands_for: Tensors) -> Any:
    """A transformers model whose projections multiply as the format does."""

    def forward(linear: Any, matrix: Tensor) -> Callable[[Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            rows = kind.inputs(x.reshape(-1, x.shape[-1]))
            y = rows @ matrix.t()
            y = y if linear.bias is None else y + linear.bias
            return y.reshape(*x.shape[:-1], -1).to(x.dtype)

        return multiply

    for name, module in model.named_modules():
        if name in stands_for:
            module.forward = forward(module, stands_for[name])
    return model
