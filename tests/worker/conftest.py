"""Prompts of the demo model, for the worker's tests of whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.worker.execution import prompts


@pytest.fixture(scope="session")
def demo_prompts(demo_model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in prompts.TEXTS]
