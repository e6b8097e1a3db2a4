"""A model's directory as people publish it, without its weights.

What several files say has one answer here: worker, frontends and the check before a start all ask
this module.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.openai.sampling import SamplingDefaults
from radixgrove.protocol.text.tokenizer import (
    TOKENIZER_JSON,
    GivenTemplateError,
    Prompting,
    TokenizerError,
    TokenizerFiles,
    json_object,
)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20


class DamagedFileError(ModelError):
    """A file is missing or malformed; another copy of the model may help."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """The small files of a model."""

    config: ModelConfig
    tokenizer: TokenizerFiles
    eos_ids: tuple[int, ...]  # any of these ends an answer
    sampling: SamplingDefaults  # that its authors recommend

    @classmethod
    def load(cls, path: Path, prompting: Prompting | None = None) -> ModelDirectory:
        """
        Raises:
            ModelError: the model cannot be served; a `DamagedFileError` where a file is at fault.
            GivenTemplateError: as `TokenizerFiles.load`.
        """
        raw = read_json(path / CONFIG, MAX_CONFIG_BYTES)
        config = parse_config(raw)
        generation: dict[str, Any] = {}
        if (path / GENERATION_CONFIG).exists():
            generation = read_json(path / GENERATION_CONFIG, MAX_CONFIG_BYTES)
        try:
            files = TokenizerFiles.load(path, prompting)
            eos_ids = _eos_ids(generation, raw, config.vocab_size)
            if not eos_ids:
                eos_ids = _valid_ids(files.eos_id, config.vocab_size)
        except GivenTemplateError:
            raise
        except TokenizerError as error:
            raise DamagedFileError(str(error)) from error
        return cls(config, files, eos_ids, _sampling_defaults(generation))


def load_config(path: Path) -> ModelConfig:
    """Read `config.json` of the directory `path`.

    Raises:
        ModelError: the file is missing or broken, or describes a model that is not supported.
    """
    return parse_config(read_json(path / CONFIG, MAX_CONFIG_BYTES))


def known_tokens(path: Path) -> int | None:
    """How many ids the tokenizer of the directory `path` decodes; None without a tokenizer.

    Raises:
        DamagedFileError: its files are malformed.
    """
    if not (path / TOKENIZER_JSON).exists():
        return None
    try:
        return TokenizerFiles.load(path).size
    except TokenizerError as error:
        raise DamagedFileError(str(error)) from error


def read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        DamagedFileError: it cannot be read, is larger than `most_bytes`, or is not a JSON object.
    """
    try:
        content = path.read_bytes() if path.stat().st_size <= most_bytes else None
    except OSError as error:
        raise DamagedFileError(f"cannot read {path}: {error.strerror}") from error
    if content is None:
        raise DamagedFileError(f"{path} is larger than {most_bytes} bytes")
    try:
        return json_object(content)
    except ValueError as error:
        raise DamagedFileError(f"{path} is not a JSON object: {error}") from error


def weight_files(path: Path) -> dict[str, frozenset[str] | None]:
    """The checkpoint's files by name, each with the tensors to take from it; None: all it has.

    A single file goes before an index, and of several copies of a tensor the index's counts.

    Raises:
        DamagedFileError: the index is unusable.
    """
    index = path / WEIGHTS_INDEX
    if (path / WEIGHTS).exists() or not index.exists():
        return {WEIGHTS: None}
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(f"{index} has no usable weight_map")
    tensors: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise DamagedFileError(f"{index} names a file outside its directory: {name!r}")
        tensors.setdefault(name, set()).add(tensor)
    return {name: frozenset(found) for name, found in sorted(tensors.items())}


def _sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """Defaults in `generation_config.json`; a value that requests may not have counts as absent."""
    valid: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        with contextlib.suppress(msgspec.ValidationError, KeyError):
            single = msgspec.convert({name: generation[name]}, SamplingDefaults)
            valid[name] = getattr(single, name)
    return SamplingDefaults(**valid)


def _eos_ids(
    generation: dict[str, Any], config: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """From `generation_config.json`, which includes the end of a chat turn, else `config.json`."""
    ids = _valid_ids(generation.get("eos_token_id"), vocab_size)
    return ids or _valid_ids(config.get("eos_token_id"), vocab_size)


def _valid_ids(found: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids in `found` (an id, a list of ids, or None) that are within the vocabulary."""
    ids = found if isinstance(found, list) else [found]
    known = [number for number in ids if type(number) is int and 0 <= number < vocab_size]
    return tuple(dict.fromkeys(known))
