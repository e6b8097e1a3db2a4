"""gpt-oss's checkpoints in four bits, written apart from the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack(stack: Tensor) -> tuple[Tensor, Tensor]:
    """[E, inputs, outputs] -> blocks [E, outputs, inputs / 32, 16], and scales without the last."""
    rows = stack.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (rows.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = rows / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


@torch.no_grad()
def quantize(directory: Path, model: Any) -> None:
    """The experts of the model in `directory`, and of `model`, which is that one: it goes on with
    what transformers makes of their bits."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        blocks, scales = pack(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": CONFIG}))
