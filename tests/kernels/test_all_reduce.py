"""All-reduce over peer memory between two real devices: sums, the same bits, captured or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

_RANK = (
    "import sys; from pathlib import Path\n"
    "from tests.kernels.test_all_reduce import run_rank\n"
    "run_rank(int(sys.argv[1]), Path(sys.argv[2]))"
)


def run_rank(rank: int, directory: Path) -> None:
    """One rank's process: sums of many sizes in turn, each checked against NCCL's."""
    from torch import distributed

    from radixgrove.kernels.norm import rms_norm_reference
    from radixgrove.worker.parallel.custom_all_reduce import PeerAllReduce

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=2, device_id=device
    )
    group = distributed.group.WORLD
    assert group is not None
    peer = PeerAllReduce(group, device, torch.bfloat16)
    peer.limit = peer.tune(4096, lambda x: distributed.all_reduce(x, group=group))
    print("rows up to which peer memory wins:", peer.limit // 4096)
    peer.limit = 1 << 20
    generator = torch.Generator(device).manual_seed(rank)

    def check(x: torch.Tensor, total: torch.Tensor) -> None:
        parts = [torch.empty_like(x) for _ in range(2)]
        distributed.all_gather(parts, x, group=group)
        assert torch.equal(total, (parts[0].float() + parts[1].float()).to(x.dtype))

    weight = torch.rand(4096, device=device).bfloat16()
    for rows in (1, 256, 3, 64, 1, 1, 200, 2, 17) * 20:
        x = torch.randn(rows, 4096, device=device, generator=generator).bfloat16()
        assert peer.takes(x)
        check(x, peer(x))
        total, normed = peer.with_norm(x, weight, 1e-6)
        check(x, total)
        expected = rms_norm_reference(total, weight, 1e-6)
        torch.testing.assert_close(normed, expected, rtol=1e-2, atol=1e-2)
    small, large = (torch.zeros(rows, 4096, device=device).bfloat16() for rows in (1, 128))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        totals = [
            peer(small),
            peer.with_norm(large, weight, 1e-6)[0],
            peer(large),
            peer.with_norm(small, weight, 1e-6)[0],
        ]
    for _ in range(50):
        for x in (small, large):
            x.normal_(generator=generator)
        graph.replay()
        for x, total in zip((small, large, large, small), totals, strict=True):
            check(x, total)
    torch.cuda.synchronize()
    distributed.destroy_process_group()


def test_two_devices_sum_alike(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
