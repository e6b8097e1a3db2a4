"""Ranks that meet over peer memory: sums, and tokens drawn from parts of the vocabulary.

On a GPU machine with two devices the ranks have one each; elsewhere they are two processes whose
kernels the interpreter runs, on memory that both map.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

SIZE = 2
HIDDEN = 1536  # less than a program has room for
PROGRAMS = 5
ROWS = (1, 5, 2, 1, 1, 3, 4)  # of calls in turn: programs take part in some and not in others
VOCABULARY = 3000  # and padding
DRAWS = 4

_RANK = (
    "import sys; from pathlib import Path\n"
    "from tests.kernels import test_all_reduce as ranks\n"
    "getattr(ranks, sys.argv[1])(int(sys.argv[2]), Path(sys.argv[3]))"
)


def run_ranks(function: str, directory: Path, **environment: str) -> None:
    """A process for each rank; all must end well."""
    command = [sys.executable, "-c", _RANK, function]
    ranks = [
        subprocess.Popen([*command, str(rank), str(directory)], env=os.environ | environment)
        for rank in range(SIZE)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()


# ---- two processes on a CPU ----------------------------------------------------------------------


def mapped(directory: Path, name: str, count: int, dtype: torch.dtype) -> list[Tensor]:
    """A buffer of each rank, of zeros at first."""
    return [
        torch.from_file(str(directory / f"{name} {rank}"), shared=True, size=count, dtype=dtype)
        for rank in range(SIZE)
    ]


def addresses(buffers: list[Tensor]) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)


def parts(dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Of each call every rank's, with what must not be taken for an empty place."""
    generator = torch.Generator().manual_seed(0)
    for rows in ROWS:
        drawn = [torch.randn(rows, HIDDEN, generator=generator).to(dtype) for _ in range(SIZE)]
        drawn[0][0, 7] = -0.0
        drawn[1][0, 9] = float("nan")
        yield drawn


def sum_as_rank(rank: int, directory: Path) -> None:
    """One rank's process: keeps what its calls came to."""
    from radixgrove.kernels.all_reduce import Exchange, all_reduce, all_reduce_norm
    from tests.kernels.interpreter import repair

    repair()
    room = Exchange.room_for(HIDDEN)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        count = Exchange.elements(PROGRAMS, room, SIZE)
        buffers = mapped(directory, str(dtype), count, dtype)
        turns = torch.zeros(PROGRAMS, dtype=torch.int32)
        exchange = Exchange(addresses(buffers), turns, room, rank)
        weight = torch.linspace(0.5, 2, HIDDEN).to(dtype)
        for index, drawn in enumerate(parts(dtype)):
            x = drawn[rank]
            total, normed = torch.empty_like(x), torch.empty_like(x)
            if index % 2:
                all_reduce(x, total, exchange)
            else:
                all_reduce_norm(x, total, normed, weight, 1e-6, exchange)
                found.append(normed)
            found.append(total)
    torch.save(found, directory / f"found {rank}")


def test_ranks_sum_alike_whatever_they_send(tmp_path: Path) -> None:
    from radixgrove.kernels.all_reduce import Exchange, cleared
    from radixgrove.kernels.norm import rms_norm_reference

    expected = []
    for dtype in (torch.bfloat16, torch.float32):
        room = Exchange.room_for(HIDDEN)
        for buffer in mapped(tmp_path, str(dtype), Exchange.elements(PROGRAMS, room, SIZE), dtype):
            cleared(buffer)
        weight = torch.linspace(0.5, 2, HIDDEN).to(dtype)
        for index, drawn in enumerate(parts(dtype)):
            total = sum(part.float() for part in drawn).to(dtype)  # type: ignore[attr-defined]
            if not index % 2:
                expected.append(rms_norm_reference(total, weight, 1e-6))
            expected.append(total)
    run_ranks("sum_as_rank", tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    first, second = (torch.load(tmp_path / f"found {rank}") for rank in range(SIZE))
    for ours, theirs, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(ours.view(torch.int8), theirs.view(torch.int8))
        torch.testing.assert_close(ours, wanted, equal_nan=True)


def logits() -> Tensor:
    """Of all ranks, [4, VOCABULARY]: with a tie across the parts, a row of NaN, and one in a
    part."""
    x = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    half = VOCABULARY // 2
    x[0, 5] = x[0, half + 5] = 9.0
    x[1] = float("nan")
    x[2, half:] = float("nan")
    return x


def sampling() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([0.0, 1.0, 0.7, 1.0]), torch.tensor([1, 2, 3, 4]), torch.arange(4) + 10


def draw_as_rank(rank: int, directory: Path) -> None:
    from radixgrove.kernels.sample import VocabShard, argmax, sample
    from tests.kernels.interpreter import repair

    repair()
    x, (temperature, seed, position) = logits(), sampling()
    buffers = mapped(directory, "winners", len(x) * 2 * SIZE, torch.int64)
    turns = torch.zeros(len(x), dtype=torch.int32)
    part = VOCABULARY // SIZE
    shard = VocabShard(rank * part, addresses(buffers), turns, rank)
    own = x[:, rank * part : (rank + 1) * part]
    found = []
    for turn in range(DRAWS):
        found.append(sample(own, temperature, seed, position + turn, shard=shard))
        found.append(argmax(own[turn:], shard=shard))
    torch.save(found, directory / f"found {rank}")


def test_ranks_draw_together_what_one_draws_alone(tmp_path: Path) -> None:
    from radixgrove.kernels.sample import sample_reference

    x, (temperature, seed, position) = logits(), sampling()
    seen = x.nan_to_num(float("-inf"))
    expected = []
    for turn in range(DRAWS):
        drawn = sample_reference(seen, temperature, seed, position + turn)
        best = seen[turn:].argmax(-1)
        for tokens, rows in (drawn, seen), (best, seen[turn:]):
            tokens[rows.amax(-1) == float("-inf")] = -1
            expected.append(tokens)
    run_ranks("draw_as_rank", tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    for rank in range(SIZE):
        found = torch.load(tmp_path / f"found {rank}")
        for ours, wanted in zip(found, expected, strict=True):
            assert ours.tolist() == wanted.tolist()


# ---- two devices ---------------------------------------------------------------------------------


def run_on_device(rank: int, directory: Path) -> None:
    """One rank's process: sums of many sizes in turn, each checked against NCCL's, and draws."""
    from torch import distributed

    from radixgrove.kernels.norm import rms_norm_reference
    from radixgrove.worker.parallel.peer_memory import PeerAllReduce

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=2, device_id=device
    )
    group = distributed.group.WORLD
    assert group is not None
    peer = PeerAllReduce(group, device, torch.bfloat16, 4096)
    peer.limit = peer.tune(lambda x: distributed.all_reduce(x, group=group))
    print("rows up to which peer memory wins:", peer.limit // 4096)
    peer.limit = 1 << 20
    generator = torch.Generator(device).manual_seed(rank)

    def check(x: Tensor, total: Tensor) -> None:
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
    check_draws(rank, device, group)
    torch.cuda.synchronize()
    distributed.destroy_process_group()


def check_draws(rank: int, device: torch.device, group: torch.distributed.ProcessGroup) -> None:
    from radixgrove.kernels.sample import sample
    from radixgrove.worker.parallel.peer_memory import PeerWinners

    rows, vocabulary = 200, 128256
    half = vocabulary // 2
    winners = PeerWinners(group, device, rows)
    shard = winners.of(rank * half)
    generator = torch.Generator(device).manual_seed(7)  # the same on both
    temperature = torch.rand(rows, device=device, generator=generator)
    temperature[::3] = 0.0
    seed = torch.arange(rows, device=device)
    for turn in range(50):
        x = torch.randn(rows, vocabulary, device=device, generator=generator)
        position = torch.full((rows,), turn, device=device)
        alone = sample(x, temperature, seed, position)
        own = x[:, rank * half : (rank + 1) * half]
        assert torch.equal(sample(own, temperature, seed, position, shard=shard), alone)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_sum_and_draw_alike(tmp_path: Path) -> None:
    run_ranks("run_on_device", tmp_path)
