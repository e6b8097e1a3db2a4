"""The model's tokenizer as grammars know it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import load_tokenizer
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.protocol.text.tokenizer import TokenizerError


def tokenizer_of(model_dir: Path) -> LLTokenizer:
    """
    Raises:
        ConstraintError: grammars cannot be used with the tokenizer of that directory.
    """
    try:
        model = ModelDirectory.load(model_dir)
        tokenizer = model.tokenizer.tokenizer()
    except (ModelError, TokenizerError, OSError) as error:
        raise ConstraintError("this model's tokenizer cannot be read") from error
    return load_tokenizer(tokenizer, model.config.vocab_size, model.eos_ids)


def read_ahead(model_dir: Path) -> Callable[[], LLTokenizer]:
    """Begin to read the tokenizer; what is returned waits for it, and reads it anew if that failed.
    Raises ConstraintError as `tokenizer_of`."""
    first = ThreadPoolExecutor(1, "tokenizer").submit(tokenizer_of, model_dir)
    return lambda: tokenizer_of(model_dir) if first.exception() else first.result()
