"""A byte-level tokenizer without merges; its special tokens have the ids of a published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(
    directory: Path,
    *,
    vocabulary: dict[str, int] | None = None,
    added: dict[str, bool] | None = None,
    **config: Any,
) -> None:
    """
    Args:
        vocabulary: tokens of the model itself, beside the 256 bytes.
        added: tokens that `tokenizer.json` adds: text → whether it is special.
        config: of `tokenizer_config.json`.
    """
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, **(vocabulary or {})}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text, special in (added or {}).items():
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
