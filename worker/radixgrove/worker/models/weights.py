"""Filling a decoder's parameters: from safetensors by memory map, or at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixgrove.worker.models.config import ModelError
from radixgrove.worker.models.layers import WeightPart

MAX_INDEX_BYTES = 64 << 20
_DUMMY_SCALE = 0.02  # the usual initialisation: activations stay in range at any depth


def load_safetensors(
    parts: Iterable[WeightPart], model_dir: Path, progress: Callable[[float], None]
) -> None:
    """Copy each part from its file's memory map into its parameter; a rank reads only its slices.

    Args:
        progress: called with the fraction done, now and then.

    Raises:
        ModelError: no checkpoint, a tensor is missing or has an unexpected shape.
    """
    wanted = list(parts)
    with ExitStack() as stack:
        locate = _Checkpoint(model_dir, stack)
        missing = [part.name for part in wanted if part.name not in locate]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(f"checkpoint lacks {', '.join(missing[:3])}{more}")
        for done, part in enumerate(wanted, 1):
            _copy(locate[part.name], part)
            if done % 16 == 0 or done == len(wanted):
                progress(done / len(wanted))


def fill_random(parts: Iterable[WeightPart], seed: int) -> None:
    """Random matrices (normal, 0.02), unit norms, zero biases: the shape of a model at work."""
    generators: dict[torch.device, torch.Generator] = {}
    for part in parts:
        target = part.target
        if target.ndim > 1:
            generator = generators.get(target.device)
            if generator is None:
                generator = torch.Generator(target.device).manual_seed(seed)
                generators[target.device] = generator
            target.normal_(0.0, _DUMMY_SCALE, generator=generator)
        else:
            target.fill_(0.0 if part.name.endswith(".bias") else 1.0)


class _Checkpoint:
    """Tensors of a directory by name, each as the safetensors slice of its open file."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in _files(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_slice(name)


def _files(model_dir: Path) -> Iterator[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.exists():
        yield model_dir / "model.safetensors"
        return
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ModelError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} has no usable weight_map") from error
    for name in sorted(names):
        if Path(name).name != name:
            raise ModelError(f"{index} names a file outside its directory: {name!r}")
        yield model_dir / name


def _copy(source: Any, part: WeightPart) -> None:
    shape = tuple(source.get_shape())
    if shape != part.shape:
        raise ModelError(f"{part.name} has shape {shape}, the config asks for {part.shape}")
    stop = part.start + part.target.shape[part.dim]
    window = slice(part.start, stop)
    part.target.copy_(source[window] if part.dim == 0 else source[:, window])
