"""What a frontend knows of the model it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from radixgrove.protocol.model.directory import ModelDirectory
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
            ValueError: a file is missing or malformed, or the model cannot be served.
        """
        directory = ModelDirectory.load(model_dir)
        config, files = directory.config, directory.tokenizer
        encoder = PromptEncoder(files)
        longest = config.max_position_embeddings
        names = tuple(settings.served_model_name) or (model_dir.name,)
        types = f"{settings.dtype}\0{settings.kv_dtype}"
        identity = f"{names[0]}\0{settings.weight_version}\0{types}\0{files.digest}"
        return cls(
            names=names,
            limits=ModelLimits(
                max_model_len=min(longest, settings.max_model_len or longest),
                vocab_size=config.vocab_size,
            ),
            eos_ids=directory.eos_ids,
            fingerprint="fp_" + sha256(identity.encode()).hexdigest()[:12],
            created=int(time.time()),
            files=files,
            encoder=encoder,
            vocabulary=Vocabulary(encoder.tokenizer, config.vocab_size),
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
