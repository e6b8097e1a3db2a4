"""How the ranks of one node find each other: through a file in the worker's runtime directory."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore

from radixgrove.protocol.errors import PeerError
from radixgrove.worker.parallel.group import Shard, TensorParallel

# Loading and compiling differ between ranks; collectives of a running step have a shorter deadline.
START_SECONDS = 600.0
_POLL_SECONDS = 0.05


class RankMissing(PeerError, RuntimeError):
    """A rank did not come, fell silent or failed; the message names it."""


def join(
    directory: Path,
    shard: Shard,
    device: torch.device,
    *,
    arrival: float = 60.0,
    collectives: float = START_SECONDS,
) -> TensorParallel:
    """Meet the other ranks and form the group: NCCL on CUDA, Gloo on a CPU.

    Args:
        directory: the runtime directory, the same for all ranks.
        arrival: seconds to wait for the others.
        collectives: seconds a collective may take until `limit_collectives` says otherwise.

    Raises:
        RankMissing: names the ranks that did not come in time.
    """
    if shard.size == 1:
        return TensorParallel(shard)
    store = FileStore(str(directory / "ranks"), shard.size)
    store.set(_key(shard.rank), "here")
    _await_ranks(store, shard, arrival)
    on_cuda = device.type == "cuda"
    # Ranks of a node talk over the loopback interface: no address of the host is involved.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=PrefixStore("collectives", store),
        rank=shard.rank,
        world_size=shard.size,
        timeout=timedelta(seconds=collectives),
        device_id=device if on_cuda else None,
    )
    return TensorParallel(shard, distributed.group.WORLD, device)


def limit_collectives(group: TensorParallel, seconds: float) -> None:
    """From now on a collective that takes longer fails."""
    if group.size > 1:
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def leave(group: TensorParallel) -> None:
    if group.size > 1 and distributed.is_initialized():
        distributed.destroy_process_group()


def _key(rank: int) -> str:
    return f"rank-{rank}"


def _await_ranks(store: FileStore, shard: Shard, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    missing = list(range(shard.size))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankMissing(f"rank {names} did not join within {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
