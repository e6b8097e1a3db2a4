"""A look at a model's files before any process is started for them.

A damaged file would otherwise show as the trace of whichever process read it first, after seconds
of loading. Weights are not read: only the headers of their files, against the files' sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from radixgrove.protocol.formats.table import AUTO, UnknownFormatError
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import (
    WEIGHTS,
    WEIGHTS_INDEX,
    DamagedFileError,
    ModelDirectory,
    weight_files,
)
from radixgrove.protocol.model.fit import Intended, check_fit
from radixgrove.protocol.openai.sampling import SamplingDefaults
from radixgrove.protocol.settings import DType, LoadFormat, SamplingSource, WorkerSettings
from radixgrove.protocol.text.templates import ChatTemplate
from radixgrove.protocol.text.tokenizer import GivenTemplateError, Prompting
from radixgrove.service import exit_codes

_AGAIN = "download or copy the model again (the demo model: remove that directory)"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER_BYTES = 1024
# Weights that people have in other forms, by a pattern of their names, and what helps then.
_OTHER_WEIGHTS = {
    "model-*-of-*.safetensors": f"shards without {WEIGHTS_INDEX}; {_AGAIN}",
    "*.incomplete": f"a download that was broken off; {_AGAIN}",
    "pytorch_model*.bin": "weights in torch's own form: AutoModelForCausalLM of transformers "
    "converts them (from_pretrained, save_pretrained)",
    "*.gguf": "a GGUF file, which is not served: take the model that it was made of",
    "consolidated*": "weights in their authors' own form: take the model in transformers' form",
    "adapter_model*": "an adapter (LoRA); merge it into its model and save that",
}


@dataclass(frozen=True, slots=True)
class Remark:
    """What people should know of a model that can be served."""

    text: str
    warns: bool = False


def check_for(settings: WorkerSettings, model_dir: Path) -> ModelDirectory:
    """Refuse a model that a worker with these settings cannot serve, as far as its files say.

    Raises:
        ModelError: as `check`.
        CodedStartFailed: the model does not divide as asked, or is shorter than asked: settings are
            wrong, not its files.
    """
    weights = settings.load_format is LoadFormat.SAFETENSORS
    model = check(model_dir, settings, weights=weights)
    # Ranks would find it out one by one, after they have been started.
    try:
        check_fit(model.config, intended_by(settings))
    except ModelError as error:
        raise exit_codes.CodedStartFailed(str(error), exit_codes.USAGE) from error
    return model


def intended_by(settings: WorkerSettings) -> Intended:
    """How a worker is to run its model."""
    return Intended(
        tp=settings.tp,
        pp=settings.pp,
        ep=settings.ep,
        pp_layers=tuple(settings.pp_layers),
        dtype="" if settings.dtype is DType.AUTO else settings.dtype,
        quantize=settings.quantize,
        max_model_len=settings.max_model_len,
    )


def check(model_dir: Path, prompting: Prompting | None = None, *, weights: bool) -> ModelDirectory:
    """Looks at configuration, tokenizer and, with `weights`, at the weights' headers.

    Raises:
        ModelError: the first file that is damaged, or why the model cannot be served.
    """
    try:
        model = ModelDirectory.load(model_dir, prompting)
        _ = model.tokenizer.size, model.tokenizer.format  # both are read of the files here
        template = model.tokenizer.chat_template()
        if template is not None:
            _check_template(template, model, prompting)
        if weights:
            _check_weights(model_dir)
    except (UnknownFormatError, GivenTemplateError) as error:
        raise ModelError(str(error)) from error
    except ValueError as error:
        if isinstance(error, ModelError) and not isinstance(error, DamagedFileError):
            raise ModelError(f"model directory '{model_dir}': {error}") from error
        raise _damaged(model_dir, str(error)) from error
    return model


def remarks(model: ModelDirectory, settings: WorkerSettings) -> Iterator[Remark]:
    """How the output is read, how tokens are drawn by default, and a tokenizer that knows more
    tokens than the model."""
    form = model.tokenizer.format
    unread = ": requests with tools are refused" if form.calls is None else ""
    template = model.tokenizer.tool_template() or model.tokenizer.chat_template() or ""
    unknown = bool(unread) and settings.output_format == AUTO and "tools" in template
    yield Remark(f"output format: {form}{unread}", warns=unknown)
    if settings.sampling_defaults is SamplingSource.MODEL:
        yield from _recommended(model.sampling)
    tokens, rows = model.tokenizer.size, model.config.vocab_size
    if tokens > rows:
        yield Remark(
            f"the tokenizer has {tokens} token ids and the model rows for {rows}: prompts with one "
            "of the others are refused",
            warns=True,
        )


def _recommended(sampling: SamplingDefaults) -> Iterator[Remark]:
    usual = msgspec.structs.asdict(SamplingDefaults())
    changed = {k: v for k, v in msgspec.structs.asdict(sampling).items() if v != usual[k]}
    if changed:
        drawn = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        yield Remark(
            f"by default tokens are sampled with {drawn}, as the model recommends "
            "(sampling_defaults: openai keeps OpenAI's values)"
        )


def _check_template(source: str, model: ModelDirectory, prompting: Prompting | None) -> None:
    given = prompting.chat_template if prompting is not None else None
    try:
        ChatTemplate(source, model.tokenizer.special_texts())
    except ValueError as error:
        if given is None:
            raise
        raise GivenTemplateError(given, str(error)) from error


def _check_weights(model_dir: Path) -> None:
    """Headers of the files that will be loaded; what else lies in the directory does not matter."""
    for name in weight_files(model_dir):
        path = model_dir / name
        if not path.exists():
            raise _missing(path)
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise DamagedFileError(f"{name} is incomplete or damaged") from error


def _missing(path: Path) -> ModelError:
    if path.is_symlink():
        return DamagedFileError(f"{path.name} is a link to {path.readlink()}, which is not there")
    if path.name == WEIGHTS:
        for pattern, what in _OTHER_WEIGHTS.items():
            if any(path.parent.glob(pattern)):
                return ModelError(f"there is no {WEIGHTS}, but {what}")
    return DamagedFileError(f"{path.name} is missing")


def _damaged(model_dir: Path, problem: str) -> ModelError:
    remedy = _AGAIN
    if pointers := sorted(path.name for path in model_dir.iterdir() if _is_lfs_pointer(path)):
        remedy = f"{pointers[0]} is a pointer of Git LFS, not the file: `git lfs pull` fetches it"
    return DamagedFileError(f"model directory '{model_dir}': {problem}; {remedy}")


def _is_lfs_pointer(path: Path) -> bool:
    """False also of a file that cannot be read, which is not what is looked for here."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_POINTER_BYTES:
            return False
        return path.read_bytes().startswith(_LFS_POINTER)
    except OSError:
        return False
