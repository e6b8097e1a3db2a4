"""An engine in the caller's own process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker import OfflineEngine
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import greedy

TOKENS = 8


@pytest.mark.parametrize("tp", [1, 2])
def test_it_generates_what_transformers_does(tp: int, tmp_path: Path) -> None:
    model, prompts = tiny.save("llama", tmp_path), tiny.prompts()
    expected = reference.greedy(model, prompts, TOKENS)
    settings = WorkerSettings(device=Device.CPU, dtype=DType.FLOAT32, kv_tokens=4096, tp=tp)
    environment = dict(os.environ)
    with OfflineEngine(settings, tmp_path) as engine:
        assert engine.generate(prompts, greedy(TOKENS)) == expected
        counters = engine.scheduler.counters
        assert counters.cached_tokens == 0
        assert engine.generate(prompts[-1:], greedy(TOKENS)) == expected[-1:]
        assert counters.cached_tokens == len(prompts[-1]) // 16 * 16
        with pytest.raises(InvalidInput, match=r"^prompt 1: "):
            engine.generate([[1], [1] * 300], greedy(TOKENS))
        assert engine.generate(prompts[:1], greedy(TOKENS)) == expected[:1], "it goes on"
        assert dict(os.environ) == environment, "what the caller starts inherits nothing of it"
