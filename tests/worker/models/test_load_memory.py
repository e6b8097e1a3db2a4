"""Loading takes the memory of the weights and of one shard beside it, not of a whole checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import load_memory
from radixgrove.protocol.settings import Device

# What torch takes when it first multiplies or fills in parallel: stacks and arenas of its threads.
_RUNTIME = 4 << 20


@pytest.mark.parametrize("kind", [pytest.param("online", marks=pytest.mark.slow), "blocks"])
def test_the_host_has_one_shard_beside_the_weights(kind: str, tmp_path: Path) -> None:
    config = load_memory.config_of(hidden=512, layers=4, experts=8, kind=kind)
    shard = load_memory.write_checkpoint(tmp_path, config, shards=5)
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert files > 2 * (shard + _RUNTIME), "all shards are hardly more than one"
    peaks = load_memory.measure(tmp_path, kind, Device.CPU)
    assert peaks.host > 0.8 * peaks.weights, "loading was not seen"
    assert peaks.host <= peaks.weights + shard + _RUNTIME
