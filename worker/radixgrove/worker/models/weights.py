"""Filling a decoder's parameters: from safetensors by memory map, or at random."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8, to_page
from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.directory import WEIGHTS_INDEX, weight_files
from radixgrove.protocol.model.fit import count_parameters
from radixgrove.worker.models.parts import EMBEDDING, FLOATS, HEAD, WeightPart

_ROWS_AT_ONCE = 4096  # when two copies of a vocabulary are compared, or eight bits are filled
_NAMED = 3  # of the tensors that are missing
_BODY = "model."  # before the names of all tensors but the head's
_MUCH_MORE = 2  # times the numbers that there are
_IGNORED = "name a projection that is not quantized among those that the config ignores"
_ALONE = "only projections may be quantized, and as quantization_config of config.json says"
_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.")
_WEIGHT, _BIAS = ".weight", ".bias"  # end the names of a projection's or a norm's tensors


def check_size(config: ModelConfig, model_dir: Path) -> None:
    """Refuse a config that asks for much more than its checkpoint has, before memory is taken for
    it, or for fewer layers. (What is missing or of another shape is named by `load_safetensors`.)

    Raises:
        ModelError: no checkpoint, one with more layers, or with much less than the config asks for.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(model_dir, stack)
        there, beyond = checkpoint.count(), checkpoint.beyond(config.num_layers)
    if beyond:
        raise ModelError(
            f"config.json: num_hidden_layers is {config.num_layers}, and the checkpoint has "
            f"{beyond}"
        )
    asked = count_parameters(config)
    if asked > _MUCH_MORE * there:
        experts = f", {config.experts.count} experts" if config.experts else ""
        raise ModelError(
            f"config.json asks for {asked:,} numbers (hidden_size {config.hidden_size}, "
            f"intermediate_size {config.mlp.width}, num_hidden_layers {config.num_layers}, "
            f"num_attention_heads {config.attention.heads}, head_dim {config.attention.head_dim}, "
            f"vocab_size {config.vocab_size}{experts}), and the checkpoint has {there:,}: one of "
            "them is of another model"
        )


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
        ModelError: no checkpoint, a tensor is missing, has an unexpected shape, type or value, or
            comes with a bias that the config does not have.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(model_dir, stack)
        wanted = [_as_saved(part, checkpoint, tied=tied) for part in parts]
        missing = [part for part in wanted if part.name not in checkpoint]
        _refuse_missing([part for part in missing if not part.optional], checkpoint)
        wanted = [part for part in wanted if part.name in checkpoint]
        for part in wanted:  # before minutes of reading
            _check(part, checkpoint[part.name])
        _refuse_unread_biases(wanted, checkpoint)
        for done, part in enumerate(wanted, 1):
            _copy(checkpoint, part)
            if done % 16 == 0 or done == len(wanted):
                progress(done / len(wanted))


def fill_random(parts: Iterable[WeightPart], seed: int = 0) -> None:
    """Random matrices (normal, 0.02), unit norms, zero biases: the shape of a model at work.

    Ranks that hold the same of a tensor, as of a router, fill it alike.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for part in parts:
        target = part.target
        if part.dummy is not None:
            target.fill_(part.dummy)
            continue
        generator = generators.get(target.device)
        if generator is None:
            generator = torch.Generator(target.device)
            generators[target.device] = generator
        generator.manual_seed(crc32(f"{seed}:{part.name}:{part.window}".encode()))
        if part.store is None:
            _fill_normal(target, part.deviation, generator)
        elif part.draw is not None:
            part.store(part.draw(part.window_shape, generator))
        else:
            window = torch.empty(part.window_shape, device=target.device)
            part.store(window.normal_(0.0, part.deviation, generator=generator))


def _fill_normal(target: Tensor, deviation: float, generator: torch.Generator) -> None:
    if target.dtype not in (FLOAT8, torch.int8):
        target.normal_(0.0, deviation, generator=generator)
        return
    for rows in torch.split(target, _ROWS_AT_ONCE):
        wide = torch.empty(rows.shape, dtype=torch.float32, device=target.device)
        wide.normal_(0.0, deviation, generator=generator)
        rows.copy_(
            to_page(wide, FLOAT8) if rows.dtype == FLOAT8 else wide.round_().clamp_(-127, 127)
        )


def _as_saved(part: WeightPart, checkpoint: _Checkpoint, *, tied: bool) -> WeightPart:
    """The part under the name that the checkpoint has for it."""
    if tied and part.name == EMBEDDING and HEAD in checkpoint:
        if EMBEDDING not in checkpoint:
            return replace(part, name=HEAD)
        _compare_tables(part, checkpoint)
    if part.name in checkpoint:
        return part
    if part.instead is not None and part.instead.name in checkpoint:
        return part.instead
    known = (alias for alias in part.aliases if alias in checkpoint)
    return replace(part, name=next(known, part.name))


def _compare_tables(part: WeightPart, checkpoint: _Checkpoint) -> None:
    embedding, head = checkpoint[EMBEDDING], checkpoint[HEAD]
    for name, table in ((EMBEDDING, embedding), (HEAD, head)):
        _check(replace(part, name=name), table)
    (held,) = part.window
    for start in range(held.start, held.stop, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, held.stop))
        if not torch.equal(embedding[rows], head[rows]):
            raise ModelError(
                "config.json ties embedding and head, and the checkpoint's two tables differ; "
                "set tie_word_embeddings to false"
            )


def _refuse_missing(parts: Sequence[WeightPart], checkpoint: _Checkpoint) -> None:
    if not parts:
        return
    names: dict[str, dict[str, None]] = defaultdict(dict)  # a stack of experts has several parts
    for part in parts:
        names[part.format][" or ".join(dict.fromkeys((part.name, *part.aliases)))] = None
    kind, found = next(iter(names.items()))
    missing = list(found)
    count = sum(map(len, names.values()))
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    expected = f", which its format {kind} expects" if kind else ""
    if instead := parts[0].instead:
        expected += f"; it has no {instead.name} either, where others have the same"
    weight = parts[0].name.rpartition(".")[0] + _WEIGHT
    if kind and weight in checkpoint and checkpoint[weight].get_dtype() in FLOATS:
        expected += f"; {weight} is not quantized: {_IGNORED}"
    if parts[0].name == HEAD:
        expected += "; set tie_word_embeddings to true if the embedding is the head"
    raise ModelError(f"checkpoint lacks {', '.join(missing[:_NAMED])}{more}{expected}")


def _refuse_unread_biases(parts: Sequence[WeightPart], checkpoint: _Checkpoint) -> None:
    """What `parts` read has no other bias, but for zeros: without it the model is another one."""
    names = {part.name for part in parts}
    for weight in names:
        bias = weight.removesuffix(_WEIGHT) + _BIAS
        if bias == weight or bias in names or bias not in checkpoint:
            continue
        if checkpoint.read(bias).to(torch.float32).count_nonzero():
            raise ModelError(
                f"checkpoint has {bias}, and by config.json there is none: a key such as "
                "attention_bias or mlp_bias is that of another model"
            )


class _Checkpoint:
    """Tensors of a directory by name, each as the safetensors slice of its open file.

    One that was saved without its head has names without the `model.` of all others.
    """

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for name, tensors in weight_files(model_dir).items():
            path = model_dir / name
            if tensors is not None and not path.exists():
                raise ModelError(f"{WEIGHTS_INDEX} names {name}, which is missing in {model_dir}")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            found = file.keys() if tensors is None else tensors.intersection(file.keys())
            self._files.update(dict.fromkeys(found, file))
        self._bare = not any(name.startswith(_BODY) for name in self._files)

    def _saved(self, name: str) -> str:
        return name.removeprefix(_BODY) if self._bare else name

    def __contains__(self, name: str) -> bool:
        return self._saved(name) in self._files

    def __getitem__(self, name: str) -> Any:
        name = self._saved(name)
        return self._files[name].get_slice(name)

    def count(self) -> int:
        """Numbers in all tensors, of which nothing is read."""
        return sum(prod(self[name].get_shape()) for name in self._files)

    def beyond(self, layers: int) -> str:
        """The first tensor of a layer that a model with so many has not; "": there is none."""
        found = ((_LAYER.match(name), name) for name in self._files)
        more = [(int(layer[1]), name) for layer, name in found if layer and int(layer[1]) >= layers]
        return min(more, default=(0, ""))[1]

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        name = self._saved(name)
        return self._files[name].get_tensor(name)  # type: ignore[no-any-return]


def _copy(checkpoint: _Checkpoint, part: WeightPart) -> None:
    if part.loose:
        window = checkpoint.read(part.name).reshape(part.shape)[part.window]
    elif part.window:
        window = checkpoint[part.name][part.window]
    else:
        window = checkpoint.read(part.name)
    if part.store is None:
        part.target.copy_(window)
        return
    try:
        part.store(window)
    except ValueError as error:
        raise ModelError(f"{part.name} {error}") from error


def _check(part: WeightPart, tensor: Any) -> None:
    """Refuse a slice of safetensors of another shape or type, before anything is read."""
    shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
    found, expected = shape, part.shape
    if part.loose:
        found, expected = (tuple(size for size in x if size != 1) for x in (shape, part.shape))
    asks = f"its format {part.format}" if part.format else "the config"
    if found != expected:
        raise ModelError(f"{part.name} has shape {shape}, {asks} asks for {part.shape}")
    if kind not in part.types:
        types = ", ".join(part.types)
        hint = _IGNORED if part.format else _ALONE
        raise ModelError(f"{part.name} is of type {kind}, {asks} asks for one of {types}; {hint}")
