"""What a frontend knows of the model it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.openai.responses import ModelObject
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.frontend.detokenize import Vocabulary


@dataclass(frozen=True)
class ServedModel:
    """One model under its names, the first of which is its id."""

    names: tuple[str, ...]
    limits: ModelLimits
    eos_ids: tuple[int, ...]
    fingerprint: str
    created: int
    files: TokenizerFiles
    encoder: PromptEncoder
    vocabulary: Vocabulary

    @classmethod
    def load(cls, model_dir: Path, settings: WorkerSettings) -> ServedModel:
        """Read configuration and tokenizer; no weights.

        Raises:
            ValueError: a file is missing or malformed.
        """
        config = _json(model_dir / "config.json")
        generation = _json(model_dir / "generation_config.json")
        files = TokenizerFiles.load(model_dir)
        encoder = PromptEncoder(files)
        longest = int(config.get("max_position_embeddings") or (1 << 24))
        vocab_size = int(config.get("vocab_size") or encoder.tokenizer.get_vocab_size())
        names = tuple(settings.served_model_name) or (model_dir.name,)
        types = f"{settings.dtype}\0{settings.kv_dtype}"
        identity = f"{names[0]}\0{settings.weight_version}\0{types}\0{files.digest}"
        return cls(
            names=names,
            limits=ModelLimits(
                max_model_len=min(longest, settings.max_model_len or longest),
                vocab_size=vocab_size,
            ),
            eos_ids=_eos_ids(config, generation, vocab_size),
            fingerprint="fp_" + sha256(identity.encode()).hexdigest()[:12],
            created=int(time.time()),
            files=files,
            encoder=encoder,
            vocabulary=Vocabulary(encoder.tokenizer),
        )

    def objects(self, limits: ModelLimits) -> list[ModelObject]:
        """As `/v1/models` lists them, aliases after the id."""
        return [
            ModelObject(
                id=name,
                created=self.created,
                max_model_len=limits.max_model_len,
                root=None if name == self.names[0] else self.names[0],
            )
            for name in self.names
        ]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _eos_ids(
    config: dict[str, Any], generation: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """End-of-text ids; `generation_config.json` knows those of a chat model's turns."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    return tuple(number for number in ids if isinstance(number, int) and 0 <= number < vocab_size)
