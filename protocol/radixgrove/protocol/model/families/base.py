"""What a file of this package says of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixgrove.protocol.model.config import ModelConfig
from radixgrove.protocol.model.source import Source


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str  # in `architectures`
    model_type: str
    longest: int  # `max_position_embeddings` where the config has none
    read: Callable[[Source], ModelConfig]
