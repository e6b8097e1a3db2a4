"""A layer's experts in a checkpoint: one by one, or all in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from radixgrove.protocol.model.config import ExpertsConfig
from radixgrove.worker.models.parts import FLOATS, Piece, WeightPart


@dataclass(frozen=True, slots=True)
class ExpertPieces:
    """A layer's experts as projections of the checkpoint, of which a rank holds `window` of each
    one's width."""

    experts: ExpertsConfig
    layer: str
    hidden: int
    window: slice

    @property
    def _block(self) -> str:
        return f"{self.layer}.{self.experts.names.block}.experts"

    def gate_up(self, expert: int) -> list[Piece]:
        names, width, columns = self.experts.names, self.experts.intermediate_size, self.hidden
        return [
            Piece(
                f"{self._block}.{expert}.{name}", (width, columns), self.window, slice(0, columns)
            )
            for name in (names.gate, names.up)
        ]

    def down(self, expert: int) -> list[Piece]:
        rows, width = self.hidden, self.experts.intermediate_size
        prefix = f"{self._block}.{expert}.{self.experts.names.down}"
        return [Piece(prefix, (rows, width), slice(0, rows), self.window)]

    def where_saved(
        self, parts: Iterable[WeightPart], expert: int, pieces: Sequence[Piece]
    ) -> Iterator[WeightPart]:
        """The parts of one expert's projection, which a format has named one by one, where a
        checkpoint has them."""
        if self.experts.names.alternate:
            return self._alternating(parts, expert, pieces)
        return self._or_stacked(parts, expert, pieces)

    def _or_stacked(
        self, parts: Iterable[WeightPart], expert: int, pieces: Sequence[Piece]
    ) -> Iterator[WeightPart]:
        """The parts of one expert, that may also be in a tensor of all experts.

        transformers calls that `mlp.experts` whatever the block is called that has single ones.
        """
        name = f"{self.layer}.mlp.experts.{_stacked(pieces)}"
        height = sum(piece.shape[0] for piece in pieces)
        first, offsets = 0, {}
        for piece in pieces:
            offsets[f"{piece.prefix}.weight"] = first
            first += piece.shape[0]
        for part in parts:
            if part.name not in offsets or part.types != FLOATS:  # those are single in all of them
                yield part
                continue
            (rows, columns), first = part.window, offsets[part.name]
            window = (
                slice(expert, expert + 1),
                slice(first + rows.start, first + rows.stop),
                columns,
            )
            shape = self.experts.count, height, part.shape[1]
            store = None if part.store is None else partial(_store_first, part.store)
            stacked = replace(
                part, name=name, target=part.target[None], shape=shape, window=window, store=store
            )
            yield replace(part, instead=stacked)

    def _alternating(
        self, parts: Iterable[WeightPart], expert: int, pieces: Sequence[Piece]
    ) -> Iterator[WeightPart]:
        """See `ExpertNames.alternate`; four bits and their scales have their outputs first."""
        turns, order = len(pieces), [piece.prefix for piece in pieces]
        for part in parts:
            prefix, _, kind = part.name.rpartition(".weight")
            height, *shape = part.shape
            rows, *window = part.window
            outputs = slice(turns * rows.start, turns * rows.stop)
            turned = not kind
            at = len(shape) if turned else 0
            shape.insert(at, turns * height)
            window.insert(at, outputs)
            store = partial(
                _store_turn,
                part.store or part.target.copy_,
                part.target.device,
                slice(order.index(prefix), None, turns),
                turned,
            )
            yield replace(
                part,
                name=f"{self._block}.{_stacked(pieces)}{kind}",
                shape=(self.experts.count, *shape),
                window=(slice(expert, expert + 1), *window),
                store=store,
            )

    def biases(
        self, held: Sequence[int], of_gate_up: Tensor, of_down: Tensor | None
    ) -> Iterator[WeightPart]:
        """
        Args:
            of_gate_up: [len(held), 2 * width], gate's first. of_down: [len(held), hidden].
        """
        count, width = self.experts.count, self.experts.intermediate_size
        outputs = slice(2 * self.window.start, 2 * self.window.stop)
        for place, expert in enumerate(held):
            own = slice(expert, expert + 1)
            yield WeightPart(
                f"{self._block}.gate_up_proj_bias",
                of_gate_up[place],
                (count, 2 * width),
                (own, outputs),
                store=partial(_store_halves, of_gate_up[place]),
                dummy=0.0,
            )
            if of_down is not None:
                name, shape = f"{self._block}.down_proj_bias", (count, self.hidden)
                yield WeightPart(name, of_down[place : place + 1], shape, (own,), dummy=0.0)


def _stacked(pieces: Sequence[Piece]) -> str:
    """What the tensor of all experts is called that has these of each."""
    return ("down_proj", "gate_up_proj")[len(pieces) == 2]


def _store_first(store: Callable[[Tensor], None], window: Tensor) -> None:
    """A window of one expert of a stack, as that of a tensor of its own."""
    store(window[0])


def _store_turn(
    store: Callable[[Tensor], object],
    device: torch.device,
    turn: slice,
    turned: bool,
    window: Tensor,
) -> None:
    """Some outputs of one expert of a stack, in which they are last where it is `turned`."""
    outputs = window[0].to(device)
    store((outputs.t() if turned else outputs)[turn].contiguous())


def _store_halves(target: Tensor, window: Tensor) -> None:
    """[1, 2 N] of which gate's and up's alternate into [2 N], gate's first."""
    target.view(2, -1).copy_(window.view(-1, 2).t())
