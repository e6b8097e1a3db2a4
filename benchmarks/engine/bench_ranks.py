"""What two ranks tell each other in a decode step, each on a GPU of its own: time of each way.

    python -m benchmarks.engine.bench_ranks [--hidden 4096] [--vocab 128256] [--rows 1 64]

Sums over the ranks with the RMSNorm after them, and tokens drawn from halves of the vocabulary.
Times are medians of graph replays of several calls, one after another on each rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from benchmarks import results
from radixgrove.kernels.all_reduce import all_reduce_norm
from radixgrove.kernels.norm import rms_norm
from radixgrove.kernels.sample import VocabShard, sample
from radixgrove.kernels.timing import replay_times
from radixgrove.worker.parallel.peer_memory import PeerAllReduce, PeerWinners

RANKS = 2
ROWS = (1, 8, 64, 128, 256)
WARPS = (4, 8, 16)
CALLS, DRAWS = 64, 8  # timed together
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank's process has."""

    rank: int
    group: distributed.ProcessGroup
    peer: PeerAllReduce
    shard: VocabShard
    hidden: int
    part: int  # of the vocabulary
    device: torch.device

    def ways(self, rows: int) -> Iterator[tuple[str, Callable[[], object], int]]:
        """A name, a call, and how many of them are timed together."""
        x = torch.randn(rows, self.hidden, device=self.device).bfloat16()
        weight, total, out = torch.ones_like(x[0]), torch.empty_like(x), torch.empty_like(x)

        def by_nccl() -> None:
            distributed.all_reduce(x, group=self.group)
            rms_norm(x, weight, 1e-6)

        def with_norm(warps: int) -> None:
            all_reduce_norm(x, total, out, weight, 1e-6, self.peer.exchange, warps)

        yield "NCCL, norm", by_nccl, CALLS
        yield "peer memory", partial(self.peer, x), CALLS
        for warps in WARPS:
            yield f"peer memory with norm, {warps} warps", partial(with_norm, warps), CALLS

        logits = torch.randn(rows, self.part, device=self.device)
        ones, seeds = torch.ones_like(logits[:, 0]), torch.arange(rows, device=self.device)

        def from_all() -> None:
            parts = logits.new_empty(RANKS * rows, self.part)
            distributed.all_gather_into_tensor(parts, logits, group=self.group)
            gathered = parts.view(RANKS, rows, -1).transpose(0, 1).reshape(rows, -1)
            sample(gathered, ones, seeds, seeds)

        yield "draw from gathered logits", from_all, DRAWS
        own = partial(sample, logits, ones, seeds, seeds, shard=self.shard)
        yield "draw from halves", own, DRAWS


def measure(rank: int, directory: str, hidden: int, vocab: int, batches: Sequence[int]) -> None:
    """One rank's process; the first one prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = f"file://{directory}/meet"
    distributed.init_process_group(
        "nccl", init_method=meeting, rank=rank, world_size=RANKS, device_id=device
    )
    group = distributed.group.WORLD
    assert group is not None
    peer = PeerAllReduce(group, device, torch.bfloat16, hidden)
    winners = PeerWinners(group, device, max(batches))
    part = vocab // RANKS
    own = Rank(rank, group, peer, winners.of(rank * part), hidden, part, device)
    for rows in batches:
        for what, call, calls in own.ways(rows):
            us = _microseconds(call, calls)
            if rank == 0:
                print(f"{what:<36}{rows:>5} rows {us:9.2f} us", flush=True)
                _record(f"{what}, {rows} rows", us)
    torch.cuda.synchronize()
    distributed.destroy_process_group()


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Median time of one call. As many replays on every rank, which wait for each other."""

    def run() -> None:
        for _ in range(calls):
            call()

    call()
    return statistics.median(replay_times(run, REPEATS)) * 1e3 / calls


def _record(workload: str, us: float) -> None:
    results.record(
        {
            "benchmark": "kernels",
            "workload": workload,
            "model": None,
            "subject": "radixgrove",
            "metric": "time",
            "value": us,
            "unit": "us",
        }
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        sizes = str(Path(directory)), arguments.hidden, arguments.vocab, arguments.rows
        multiprocessing.start_processes(measure, sizes, RANKS)  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
