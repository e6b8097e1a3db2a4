"""What compiling meanwhile is given: the products as this rank has them, and its part of the
machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixgrove.kernels.autotune import LinearTuner
from radixgrove.kernels.compilers import Room
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.settings import Device, LoadFormat, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution import loading
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.ops import KernelOps
from radixgrove.worker.parallel.group import Shard, TensorParallel
from tests.worker.execution import tiny

GIB = 1 << 30
FOUR_RANKS = SimpleNamespace(ranks_per_node=4)


class Reached(Exception):
    """So that nothing is loaded."""


def test_ranks_of_a_machine_share_its_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {**tiny._SIZES, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rooms: list[Room] = []

    def compiling(
        tuner: LinearTuner, projections: Any, batch: int, tokens: int, room: Room, others: Any
    ) -> None:
        rooms.append(room)
        raise Reached

    monkeypatch.setattr(LinearTuner, "compiling", compiling)
    monkeypatch.setattr(loading, "Layout", SimpleNamespace(of=lambda _: FOUR_RANKS))
    monkeypatch.setattr(loading.machine, "cores", lambda: 66)
    monkeypatch.setattr(loading.machine, "free_memory", lambda: 10 * GIB)
    settings = WorkerSettings(device=Device.CPU, load_format=LoadFormat.DUMMY)
    with pytest.raises(Reached):
        build_executor(settings, tmp_path, lambda phase: None)
    assert rooms == [Room(cores=16, memory=10 * GIB // 4)]


@pytest.mark.parametrize("rank", [0, 1])
def test_products_are_measured_with_the_stream_on_the_rank_that_adds_to_it(rank: int) -> None:
    _, changes = tiny.KINDS["qwen2-moe"]
    raw = {**tiny._SIZES, **changes, "architectures": ["Qwen2MoeForCausalLM"]}
    group: Any = TensorParallel(Shard(rank, 2), object())  # type: ignore[arg-type]
    place = TensorPlacement(group, torch.bfloat16, torch.device("cpu"))
    decoder = Decoder(parse_config(raw), place, KernelOps())
    found = [kind.residual for kind in decoder.projections() if not kind.normed and not kind.wide]
    # Attention's, the dense layers' and the shared experts', which add to other experts' results.
    assert found == [rank == 0, rank == 0, True]
    *_, residual = decoder.experts()
    assert residual is (rank == 0)
