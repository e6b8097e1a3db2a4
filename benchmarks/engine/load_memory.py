"""The most memory that loading a checkpoint takes, on the device and of the host.

    python -m benchmarks.engine.load_memory --hidden 4096 --layers 8 --experts 16 --format blocks

Writes a checkpoint of several shards with random values into a temporary folder, loads it as a
worker does in a process of its own, and prints a line of JSON for each format. Of the host, memory
that no file stands behind counts: pages of mapped files the kernel takes back as it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.settings import Device, Quantize, WorkerSettings
from radixgrove.worker.execution.choices import (
    Limits,
    choose_device,
    choose_dtype,
    choose_quantization,
)
from radixgrove.worker.execution.loading import load_model
from radixgrove.worker.execution.memory import kv_shape
from radixgrove.worker.messages import PhaseReport
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.formats.choose import choose_formats
from radixgrove.worker.models.ops import choose_ops
from radixgrove.worker.models.parts import WeightPart
from radixgrove.worker.models.stages import Stage
from radixgrove.worker.parallel.group import Shard, TensorParallel

FORMATS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "online": None,  # quantized while it is read
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}
_SAMPLE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes, above what there was before."""

    weights: int  # as they are served
    host: int
    device: int  # 0 on a CPU


def config_of(hidden: int, layers: int, experts: int, kind: str) -> dict[str, Any]:
    """A config.json: Qwen3's architecture with experts or without."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": FORMATS[kind],
    }
    if experts:
        width = {"moe_intermediate_size": hidden // 2, "num_experts": experts}
        config |= {**width, "num_experts_per_tok": 2}
    return config


def write_checkpoint(directory: Path, config: dict[str, Any], shards: int) -> int:
    """Random values in `shards` files; the bytes of the largest."""
    (directory / "config.json").write_text(json.dumps(config))
    parts = list(_decoder(config).parts())
    homes = {
        part.name: f"model-{index * shards // len(parts):05}.safetensors"
        for index, part in enumerate(parts)
    }
    for shard in sorted(set(homes.values())):
        tensors = {part.name: _random(part) for part in parts if homes[part.name] == shard}
        save_file(tensors, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return max((directory / shard).stat().st_size for shard in homes.values())


def _decoder(config: dict[str, Any]) -> Decoder:
    """Without memory: for the names and shapes of its tensors."""
    device = torch.device("meta")
    parsed = parse_config(config)
    formats = choose_formats(choose_quantization(Quantize.NONE, parsed, device))
    place = TensorPlacement(TensorParallel(Shard()), torch.bfloat16, device, formats)
    return Decoder(parsed, place, choose_ops(torch.device("cpu"), torch.bfloat16), None)


def _random(part: WeightPart) -> Tensor:
    if part.types == ("F8_E4M3",):
        return torch.randn(part.shape).to(torch.float8_e4m3fn)
    if part.dummy is not None:
        return torch.full(part.shape, part.dummy, dtype=torch.float32)
    return torch.randn(part.shape, dtype=torch.bfloat16)


class HostPeak:
    """The most memory of its own that this process has had while the context is open, in bytes."""

    def __enter__(self) -> HostPeak:
        self.bytes = self._before = _own_memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.bytes = max(self.bytes, _own_memory())

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, _own_memory()) - self._before


def _own_memory() -> int:
    """Bytes in memory that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = (line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return sum(int(size) for size in sizes) * 1024


def load(directory: Path, kind: str, device: Device) -> Peaks:
    """In this process, which had better do nothing else."""
    settings = WorkerSettings(
        device=device,
        quantize=Quantize.FP8 if kind == "online" else Quantize.NONE,
        max_running=8,
        max_step_tokens=256,
    )
    config, where = load_config(directory), choose_device(device, 0)
    dtype = choose_dtype(settings.dtype, config, where)
    formats = choose_formats(choose_quantization(settings.quantize, config, where))
    place = TensorPlacement(TensorParallel(Shard()), dtype, where, formats)
    limits, stage = Limits.of(settings, where), Stage.whole(config)
    shape = kv_shape(config, settings.page_size, dtype, place.group.shard)
    on_cuda = where.type == "cuda"
    before = 0
    if on_cuda:
        torch.zeros(1, device=where)  # the context, which is no part of loading
        before = torch.cuda.memory_allocated(where)
    with HostPeak() as host:
        model = load_model(settings, config, limits, directory, place, shape, stage, _nothing)
    peak = torch.cuda.max_memory_allocated(where) - before if on_cuda else 0
    return Peaks(model.weights_bytes, host.bytes, peak)


def measure(directory: Path, kind: str, device: Device) -> Peaks:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.load_memory", "--load", str(directory)]
    result = subprocess.run(
        [*command, "--format", kind, "--device", device.value],
        # What is freed leaves the process at once, as it does with tensors of real sizes.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Peaks(**json.loads(result.stdout.splitlines()[-1]))


def _nothing(phase: PhaseReport) -> None:
    """Drops what a worker would say."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--device", default="auto", choices=[d.value for d in Device])
    parser.add_argument("--load", type=Path, help="load this directory, here, and write none")
    arguments = parser.parse_args(argv)
    device = Device(arguments.device)
    for kind in arguments.format:
        if arguments.load:
            print(json.dumps(asdict(load(arguments.load, kind, device))), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(arguments.hidden, arguments.layers, arguments.experts, kind)
            shard = write_checkpoint(Path(folder), config, arguments.shards)
            peaks = measure(Path(folder), kind, device)
            said = {"format": kind, "largest_shard": shard, **asdict(peaks)}
            print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
