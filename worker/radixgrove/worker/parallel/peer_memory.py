"""What ranks tell each other over NVLink peer memory: sums of small tensors, by one kernel instead
of a NCCL ring, the tokens that each has drawn from its part of the vocabulary, and those that the
last stage of a pipeline sends back.

What crosses the links for a sum grows with the number of ranks, so it wins for decode batches and
loses for prefill; `tune` measures where. NVLink multicast is not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from radixgrove.kernels.all_reduce import (
    MAX_PROGRAMS,
    Exchange,
    all_reduce,
    all_reduce_norm,
    cleared,
)
from radixgrove.kernels.sample import History, VocabShard
from radixgrove.kernels.timing import replay_times
from radixgrove.kernels.token_mail import MARKS, post, take

_MAX_BYTES = 4 << 20  # of a tensor
_CALLS = 20  # in one measurement


_groups_ended = False


def end_groups() -> None:
    """No later group of this process can share memory: torch remembers by a group's name, which a
    later one bears too, where its ranks met, and would wait there."""
    global _groups_ended
    _groups_ended = True


def is_possible(devices: Sequence[int]) -> bool:
    """Whether a group's devices reach each other; `RADIXGROVE_PEER_ALL_REDUCE=0` turns it off.

    Ranks may differ in their answer: those of a second group in a process, as of `end_groups`.
    """
    if _groups_ended or os.environ.get("RADIXGROVE_PEER_ALL_REDUCE", "1") == "0":
        return False
    pairs = ((a, b) for a in devices for b in devices if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


class PeerAllReduce:
    """The buffer of one rank, mapped by the others; used by one stream at a time.

    Attributes:
        exchange: where its kernels meet the other ranks'.
        limit: elements of the largest tensor for which it is the faster way; 0 before `tune`.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype, hidden: int
    ) -> None:
        """
        Args:
            hidden: values of a row, of which each program takes one.
        """
        self._device = device
        self._dtype = dtype
        room = Exchange.room_for(hidden)
        programs = min(MAX_PROGRAMS, _MAX_BYTES // (room * dtype.itemsize))
        elements = Exchange.elements(programs, room, group.size())
        self._buffer, buffers = _share(group, elements, dtype, device, cleared)
        turns = torch.zeros(programs, dtype=torch.int32, device=device)
        self.exchange = Exchange(buffers, turns, room, group.rank())
        self._most = programs * hidden
        self._hidden = hidden
        self.limit = 0

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is small enough, of the buffer's dtype, and aligned to 16 bytes."""
        aligned = x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0 and x.is_contiguous()
        return x.numel() <= self.limit and x.dtype == self._dtype and aligned

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in a tensor of its own."""
        total = torch.empty_like(x)
        all_reduce(x, total, self.exchange)
        return total

    def with_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum over the ranks of [T, hidden], and the RMSNorm of it."""
        total, normed = torch.empty_like(x), torch.empty_like(x)
        all_reduce_norm(x, total, normed, weight, eps, self.exchange)
        return total, normed

    def tune(self, other: Callable[[Tensor], object]) -> int:
        """Measure against `other` for batches of 1, 2, 4 … rows; every rank does so.

        Returns:
            Elements up to which this one wins on this rank. The ranks must agree before `limit` is
            set: a collective that only some of them take this way would hang.
        """
        best = 0
        elements = self._hidden
        while elements <= self._most:
            x = torch.zeros(elements, dtype=self._dtype, device=self._device)
            if _milliseconds(lambda x=x: self(x)) < _milliseconds(lambda x=x: other(x)):  # type: ignore[misc]
                best = elements
            elements *= 2
        return best


class PeerWinners:
    """Where ranks tell each other what they have drawn, for batches of up to `rows`."""

    def __init__(self, group: ProcessGroup, device: torch.device, rows: int) -> None:
        words = rows * 2 * group.size()
        self._buffer, self._buffers = _share(group, words, torch.int64, device, Tensor.zero_)
        self._turns = torch.zeros(rows, dtype=torch.int32, device=device)
        self._rank = group.rank()

    def of(self, first: int) -> VocabShard:
        """For a part of the vocabulary that begins with this token."""
        return VocabShard(first, self._buffers, self._turns, self._rank)


class PeerMail:
    """Samples from the last stage to those before it, at most `rows` a step.

    Every stage says `next_step` for each step; `depth` of them are in flight at most.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        rows: int,
        depth: int,
        receivers: Sequence[int],
    ) -> None:
        """
        Args:
            group: of all stages. receivers: ranks of it to which this rank sends, if it does.
        """
        self._rows = rows
        self._steps = depth + 2  # boxes: what is in flight, and what was when it was taken
        self._box, addresses = _share(group, self._steps * rows, torch.int64, device, Tensor.zero_)
        self._receivers = addresses[list(receivers)].clone()
        self._step = 0

    def next_step(self) -> int:
        """The number of a step that begins."""
        self._step += 1
        return self._step

    def post(self, step: int, rows: Tensor, tokens: Tensor) -> None:
        """Send the samples of a step: both [S] int64."""
        post(tokens, rows, self._receivers, *self._place(step))

    def take(self, step: int, count: int, history: History) -> None:
        """Append the `count` samples of a step, for which the stream waits."""
        take(self._box, count, *self._place(step), history)

    def _place(self, step: int) -> tuple[int, int]:
        """The first place of a step's letters, and its mark."""
        return step % self._steps * self._rows, 1 + step % MARKS


def _share(
    group: ProcessGroup,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    clear: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Cleared memory [count] that the peers map, and [size] int64: its address on every rank."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    memory = clear(symmetric.empty(count, dtype=dtype, device=device))
    mapped = symmetric.rendezvous(memory, group.group_name)
    peers = [mapped.get_buffer(rank, (count,), dtype) for rank in range(group.size())]
    addresses = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    torch.distributed.barrier(group)  # no rank writes to memory that is still to be cleared
    return memory, addresses


def _milliseconds(call: Callable[[], object]) -> float:
    """Of `_CALLS` calls in a graph, the best of three replays."""

    def run() -> None:
        for _ in range(_CALLS):
            call()

    call()
    return min(replay_times(run, 3))
