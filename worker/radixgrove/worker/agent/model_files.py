"""A look at a model's files before any process is started for them.

A damaged file would otherwise show as the trace of whichever process read it first, after seconds
of loading. Weights are not read: only the headers of their files, against the files' sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from radixgrove.protocol.text.templates import ChatTemplate
from radixgrove.protocol.text.tokenizer import TokenizerError, TokenizerFiles

WEIGHTS_INDEX = "model.safetensors.index.json"
_JSON_FILES = ("config.json", "generation_config.json", WEIGHTS_INDEX)
_MAX_JSON_BYTES = 64 << 20


class DamagedModelError(Exception):
    """A file of the model cannot be used; the text names it and what to do."""


def check(model_dir: Path, *, weights: bool) -> None:
    """Looks at configuration, tokenizer and, with `weights`, at the weights' headers.

    Raises:
        DamagedModelError: the first file that is damaged.
    """
    for name in _JSON_FILES:
        if (model_dir / name).is_file():
            _check_json(model_dir, name)
    try:
        files = TokenizerFiles.load(model_dir)
        files.tokenizer()
        template = files.chat_template()
        if template is not None:
            ChatTemplate(template, files.special_texts())
    except (TokenizerError, ValueError) as error:
        raise _damaged(model_dir, str(error)) from error
    if weights:
        for path in sorted(model_dir.glob("*.safetensors")):
            try:
                with safe_open(path, framework="numpy"):
                    pass
            except (OSError, SafetensorError) as error:
                raise _damaged(model_dir, f"{path.name} is incomplete or damaged") from error


def _check_json(model_dir: Path, name: str) -> None:
    path = model_dir / name
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise _damaged(model_dir, f"{name} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(model_dir, f"{name} is not a JSON object") from error


def _damaged(model_dir: Path, problem: str) -> DamagedModelError:
    return DamagedModelError(
        f"model directory '{model_dir}': {problem}; download or copy the model again "
        "(the demo model: remove that directory)"
    )
