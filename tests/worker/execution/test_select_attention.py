"""Which attention a model has on a GPU that is set to have FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import AttentionChoice
from radixgrove.worker.attention.kv_pool import KvPool
from radixgrove.worker.execution.memory import kv_shape
from radixgrove.worker.execution.select_attention import select_attention
from radixgrove.worker.messages import PhaseReport
from radixgrove.worker.parallel.group import Shard
from tests.worker.execution import tiny

pytest.importorskip("triton")


class OnCuda(KvPool):
    """A pool that lies elsewhere: what is chosen for a GPU is made without one."""

    device = torch.device("cuda")


def select(choice: AttentionChoice, directory: Path, report: Callable[[PhaseReport], None]) -> str:
    """The name of what is chosen for a model."""
    config = load_config(directory)
    shape = kv_shape(config, 16, torch.float32, Shard(), range(config.num_layers))
    pool = shape.allocate(4, torch.device("cpu"))
    on_cuda = OnCuda(shape, pool.tensors, pool.num_pages)
    return select_attention(choice, on_cuda, config, Shard(), torch.float32, report)[1]


@pytest.mark.parametrize("choice", [AttentionChoice.FLASHINFER, AttentionChoice.AUTO])
def test_all_layers_beside_sinks_have_our_attention(
    choice: AttentionChoice, tmp_path: Path
) -> None:
    tiny.save("gpt-oss", tmp_path)
    said: list[str] = []
    name = select(choice, tmp_path, lambda phase: said.append(phase.message))
    assert name == "triton"
    assert said[-1].startswith("attention backend triton")
    assert ("though flashinfer is set" in said[-1]) == (choice is AttentionChoice.FLASHINFER)
