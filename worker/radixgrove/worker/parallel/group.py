"""Tensor parallelism: the collectives of one group of ranks, and who holds which shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radixgrove.worker.parallel.peer_memory import PeerAllReduce, PeerWinners, is_possible

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from radixgrove.kernels.sample import VocabShard


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a dimension a rank holds."""

    rank: int = 0
    size: int = 1

    def split(self, total: int) -> tuple[int, int]:
        """Start and length of this rank's part of `total`, which `size` divides."""
        if total % self.size:
            raise ValueError(f"{total} does not split into {self.size} equal parts")
        length = total // self.size
        return self.rank * length, length

    def window(self, total: int) -> slice:
        """As `split`, as a slice."""
        start, length = self.split(total)
        return slice(start, start + length)


class Activity:
    """Whether a rank's main thread waits for another rank, as a context; read by other threads.

    Attributes:
        broke: a wait ended in an error, which may be another rank's.
    """

    def __init__(self) -> None:
        self.waits = False
        self.broke = False

    def __enter__(self) -> None:
        self.waits = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.waits = False
        self.broke = self.broke or kind is not None


class TensorParallel:
    """A rank's membership of its group; with one rank every collective is the identity."""

    def __init__(
        self,
        shard: Shard,
        group: ProcessGroup | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        devices: Sequence[int] = (),
        activity: Activity | None = None,
    ) -> None:
        """
        Args:
            devices: of the group's ranks, indices on their machine.
            activity: says when a collective is waited for.
        """
        if shard.size > 1 and group is None:
            raise ValueError("a group of several ranks needs a process group")
        self.shard = shard
        self._group = group
        self._device = device
        self._devices = devices
        self._activity = activity or Activity()
        self._peer: PeerAllReduce | None = None
        self._winners: PeerWinners | None = None

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @property
    def has_stream(self) -> bool:
        """Whether this rank's parts of sums are added to the residual stream, which the sum over
        the ranks takes in once; the others' are added to nothing."""
        return self.rank == 0

    def use_peer_memory(self, hidden: int, dtype: torch.dtype, rows: int) -> int:
        """Talk over peer memory where the devices reach each other: sum activations that are
        small enough, and draw from parts of the vocabulary; rows of `hidden` up to which it is.

        Every rank calls it at the same point, since it measures collectives.

        Args:
            rows: most that a step samples.
        """
        if self._group is None or self._device.type != "cuda":
            return 0
        if not self.minimum(is_possible(self._devices)):
            return 0
        peer = PeerAllReduce(self._group, self._device, dtype, hidden)
        peer.limit = self.minimum(peer.tune(self._all_reduce))
        self._peer = peer
        self._winners = PeerWinners(self._group, self._device, rows)
        return peer.limit // hidden

    def vocab_shard(self, first: int) -> VocabShard | None:
        """What draws from this rank's part of the vocabulary, from token `first` on, so that the
        best of all parts is every rank's; None where logits have to be gathered for that."""
        return None if self._winners is None else self._winners.of(first)

    def _all_reduce(self, x: Tensor) -> Tensor:
        with self._activity:
            torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, the same bits on every rank; `x` may be overwritten."""
        if self._group is None:
            return x
        if self._peer is not None and self._peer.takes(x):
            return self._peer(x)
        return self._all_reduce(x)

    def all_reduce_norm(
        self, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The sum over the ranks of [T, hidden] and its RMSNorm, where one kernel makes both."""
        if self._peer is None or not self._peer.takes(x):
            return None
        return self._peer.with_norm(x, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, part] of each rank -> [N, size * part], in the order of the ranks."""
        if self._group is None:
            return x
        rows, part = x.shape
        parts = x.new_empty((self.size * rows, part))
        with self._activity:
            torch.distributed.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        return parts.view(self.size, rows, part).transpose(0, 1).reshape(rows, -1)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank: for sizes all must agree on."""
        if self._group is None:
            return value
        agreed = torch.tensor([value], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return int(agreed.item())
