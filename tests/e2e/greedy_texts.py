"""What transformers generates greedily, computed once a machine: it is the slowest part of a test.

The result is kept in the user's cache under a digest of everything that decides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.worker.execution import reference


def _cache_path(model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> Path:
    weights = model_dir / "model.safetensors"
    decides = {
        "weights": [weights.stat().st_size, weights.stat().st_mtime_ns],
        "config": (model_dir / "config.json").read_text(),
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "radixgrove" / "test-references" / f"{digest[:32]}.json"


def greedy_texts(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy continuations in float32, `max_tokens` a prompt."""
    path = _cache_path(model_dir, prompts, max_tokens)
    if path.exists():
        cached: list[list[int]] = json.loads(path.read_text())
        return cached
    texts = reference.greedy(reference.load(model_dir), prompts, max_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(texts, file)
    os.replace(file.name, path)
    return texts
