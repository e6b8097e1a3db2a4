"""An executor on the demo model, shared by the tests that only read its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.plan import Executor


@pytest.fixture(scope="session")
def demo_executor(demo_model_dir: Path) -> Iterator[Executor]:
    settings = WorkerSettings(
        device=Device.CPU,
        dtype=DType.FLOAT32,
        max_model_len=1024,
        max_running=64,
        kv_tokens=64 * 512,
    )
    executor, _ = build_executor(settings, demo_model_dir, lambda phase: None)
    yield executor
    executor.close()
