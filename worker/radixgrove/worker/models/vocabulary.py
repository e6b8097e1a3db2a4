"""The table of the vocabulary, of which each rank holds some rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from radixgrove.kernels.weight import Weight
from radixgrove.worker.models.context import StepContext, TensorPlacement
from radixgrove.worker.models.norms import Norm
from radixgrove.worker.models.ops import Ops
from radixgrove.worker.models.parts import WeightPart
from radixgrove.worker.parallel.group import TensorParallel


class VocabTable:
    """Rows of the vocabulary that this rank holds: as embedding, as head, or (tied) as both.

    The vocabulary is padded to equal parts; padding rows are zero and never seen outside.
    """

    def __init__(self, place: TensorPlacement, name: str, vocab_size: int, hidden: int) -> None:
        group = place.group
        length = -(-vocab_size // group.size)
        self.vocab_size = vocab_size
        self._length = length
        self._first = group.rank * length
        self.weight = place.empty(length, hidden)
        held = max(0, min(length, vocab_size - self._first))
        self.weight[held:].zero_()
        start = min(self._first, vocab_size)
        window = (slice(start, start + held),)
        self._part = WeightPart(name, self.weight[:held], (vocab_size, hidden), window)

    def parts(self) -> Iterator[WeightPart]:
        yield self._part

    def prepare_head(self, ops: Ops, *, embeds: bool) -> int:
        """Bring it into the form for `logits`; bytes of that, when it is memory of its own.

        Args:
            embeds: the table is the embedding too, which needs the plain form.
        """
        self._head = ops.prepare(Weight.plain(self.weight))
        if self._head.payload is self.weight:
            return 0
        size = self.weight.nbytes
        if not embeds:
            self.weight = self.weight.new_empty(0)
            self._part = replace(self._part, target=self.weight)
        return size

    @property
    def head(self) -> Weight:
        """The table as `logits` reads it, once prepared."""
        return self._head

    def embed(self, token_ids: Tensor, context: StepContext) -> Tensor:
        """[T] int -> [T, hidden]."""
        if context.group.size == 1:
            return self.weight.index_select(0, token_ids)
        rows = context.ops.embed(self.weight, token_ids, self._first)
        return context.group.all_reduce(rows)

    @property
    def first(self) -> int:
        """Token of this rank's first row."""
        return self._first

    @property
    def part_size(self) -> int:
        """Rows that each rank holds, padding included."""
        return self._length

    def part(self, hidden: Tensor, norm: Norm, ops: Ops, out: Tensor | None = None) -> Tensor:
        """[N, hidden] before `norm` -> [N, part_size], of this rank's rows; in `out` if given."""
        weight = norm.weight if norm.is_rms else None
        if weight is None:
            hidden = norm(hidden, ops)
        return ops.head(hidden, self._head, weight, norm.eps, out)

    def whole(self, part: Tensor, group: TensorParallel, out: Tensor | None = None) -> Tensor:
        """All ranks' parts [N, part_size] -> [N, vocab_size], on every rank; in `out` if given."""
        logits = group.all_gather(part)[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)

    def logits(
        self,
        hidden: Tensor,
        norm: Norm,
        ops: Ops,
        group: TensorParallel,
        out: Tensor | None = None,
    ) -> Tensor:
        """[N, hidden] before `norm` -> [N, vocab_size], whole on every rank; in `out` if given."""
        if out is not None and group.size == 1 and self._head.payload.layout == torch.strided:
            return self.part(hidden, norm, ops, out)
        return self.whole(self.part(hidden, norm, ops), group, out)
