"""Filling a decoder's parameters: from safetensors by memory map, or at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import weight_files
from radixgrove.worker.models.layers import EMBEDDING, HEAD, WeightPart

_ROWS_AT_ONCE = 4096  # of a vocabulary, when two copies are compared
_DUMMY_SCALE = 0.02  # the usual initialisation: activations stay in range at any depth


def load_safetensors(
    parts: Iterable[WeightPart],
    model_dir: Path,
    progress: Callable[[float], None],
    *,
    tied: bool = False,
) -> None:
    """Copy each part from its file's memory map into its parameter; a rank reads only its slices.

    Args:
        progress: called with the fraction done, now and then.
        tied: embedding and head are one table, saved under either name or both.

    Raises:
        ModelError: no checkpoint, a tensor is missing or has an unexpected shape.
    """
    wanted = list(parts)
    with ExitStack() as stack:
        locate = _Checkpoint(model_dir, stack)
        if tied:
            wanted = [_as_saved(part, locate) for part in wanted]
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


def _as_saved(part: WeightPart, checkpoint: _Checkpoint) -> WeightPart:
    """A part of a tied model under the name that its checkpoint has for it."""
    if part.name != EMBEDDING or HEAD not in checkpoint:
        return part
    if EMBEDDING not in checkpoint:
        return replace(part, name=HEAD)
    embedding, head = checkpoint[EMBEDDING], checkpoint[HEAD]
    first, stop = part.start, part.start + part.target.shape[0]
    for start in range(first, stop, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, stop))
        if not torch.equal(embedding[rows], head[rows]):
            raise ModelError(
                "config.json ties embedding and head, and the checkpoint's two tables differ; "
                "set tie_word_embeddings to false"
            )
    return part


class _Checkpoint:
    """Tensors of a directory by name, each as the safetensors slice of its open file."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for name, tensors in weight_files(model_dir).items():
            path = model_dir / name
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            found = file.keys() if tensors is None else tensors.intersection(file.keys())
            self._files.update(dict.fromkeys(found, file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_slice(name)


def _copy(source: Any, part: WeightPart) -> None:
    shape = tuple(source.get_shape())
    if shape != part.shape:
        raise ModelError(f"{part.name} has shape {shape}, the config asks for {part.shape}")
    stop = part.start + part.target.shape[part.dim]
    window = slice(part.start, stop)
    part.target.copy_(source[window] if part.dim == 0 else source[:, window])
