"""The linear layer, which knows its shard, and how its weight is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from torch import Tensor

from radixgrove.kernels.float8 import bits
from radixgrove.kernels.linear_candidates import Projection
from radixgrove.kernels.weight import QuantizedRows
from radixgrove.protocol.model.config import ModelError
from radixgrove.worker.models.context import StepContext, TensorPlacement
from radixgrove.worker.models.formats.base import fused_shape, placed
from radixgrove.worker.models.norms import Norm
from radixgrove.worker.models.ops import Inputs, Ops
from radixgrove.worker.models.parts import Piece, WeightPart


@dataclass(frozen=True, slots=True)
class Rows:
    """A projection's rows of a checkpoint's tensor."""

    prefix: str  # of the tensor's name
    size: int
    first: int
    total: int  # rows of the tensor

    @classmethod
    def own(cls, prefix: str, size: int) -> Rows:
        """All of a tensor."""
        return cls(prefix, size, 0, size)

    @classmethod
    def stacked(cls, prefix: str, sizes: Sequence[int]) -> list[Rows]:
        """Of one tensor that has several projections, one below the other."""
        firsts = accumulate(sizes, initial=0)
        return [cls(prefix, size, first, sum(sizes)) for size, first in zip(sizes, firsts)]  # noqa: B905


class Linear:
    """`y = x W^T + b`, the one way through a weight matrix.

    Column-parallel layers hold some of the outputs of each fused projection. Row-parallel ones hold
    some of the inputs, and sum their partial results over the group.
    """

    def __init__(
        self,
        place: TensorPlacement,
        pieces: Sequence[Piece],
        biases: Tensor | None,
        bias_parts: Iterable[WeightPart],
        *,
        row_parallel: bool,
    ) -> None:
        layout = place.formats.of(pieces[0].prefix)
        self.weight = layout.allocate(pieces, place.dtype, place.device)  # of this rank
        self.bias = biases
        self._parts = [*layout.parts(self.weight, pieces), *bias_parts]
        self._row_parallel = row_parallel

    @classmethod
    def column(
        cls, place: TensorPlacement, inputs: int, outputs: Sequence[Rows], *, bias: bool
    ) -> Linear:
        """Projections of one input, fused."""
        pieces = []
        for output in outputs:
            held = place.group.shard.window(output.size)
            rows = slice(output.first + held.start, output.first + held.stop)
            whole = output.total, inputs
            pieces.append(Piece(output.prefix, whole, rows, slice(0, inputs)))
        biases = place.empty(fused_shape(pieces)[0]) if bias else None
        parts = []
        if biases is not None:
            for piece, rows in placed(pieces):
                name, shape = f"{piece.prefix}.bias", piece.shape[:1]
                parts.append(WeightPart(name, biases[rows], shape, (piece.rows,), dummy=0.0))
        return cls(place, pieces, biases, parts, row_parallel=False)

    @classmethod
    def row(
        cls, place: TensorPlacement, prefix: str, inputs: int, outputs: int, *, bias: bool
    ) -> Linear:
        """A projection of what a column-parallel layer left on this rank."""
        window = place.group.shard.window(inputs)
        biases = place.empty(outputs) if bias else None
        parts = []
        if biases is not None:
            parts.append(WeightPart(f"{prefix}.bias", biases, (outputs,), dummy=0.0))
        piece = Piece(prefix, (outputs, inputs), slice(0, outputs), window)
        return cls(place, [piece], biases, parts, row_parallel=True)

    def parts(self) -> Iterator[WeightPart]:
        yield from self._parts

    def scale_outputs(self, rows: slice, factor: float) -> None:
        """Once loaded: make `factor` times of what these rows come to, a power of two."""
        weight = self.weight
        if weight.scales is None:
            weight.payload[rows].mul_(factor)
        elif weight.block is None:
            weight.scales[rows].mul_(factor)
        else:  # no block has rows of two projections
            high = weight.block[0]
            weight.scales[rows.start // high : -(-rows.stop // high)].mul_(factor)
        if self.bias is not None:
            self.bias[rows].mul_(factor)

    def reorder_outputs(self, order: Tensor) -> None:
        """Once loaded: of the first outputs let number i be what number `order[i]`, [N] int64, was.

        Raises:
            ModelError: of rows that share a scale some would go without the others.
        """
        weight, count = self.weight, len(order)
        rows = [weight.payload, *(() if self.bias is None else (self.bias,))]
        if weight.scales is not None and weight.block is None:
            rows.append(weight.scales)
        for tensor in map(bits, rows):
            tensor[:count] = tensor.index_select(0, order)
        if weight.scales is not None and weight.block is not None:
            height = weight.block[0]
            moved = weight.scales[order // height].view(-1, height, weight.scales.shape[1])
            if bool((moved != moved[:, :1]).any()):
                raise ModelError(
                    f"blocks of {height} rows that share a scale would be cut where the rotary "
                    "embedding pairs dimensions of a head; use other quantized weights, or none"
                )
            weight.scales[: len(moved)] = moved[:, 0]

    def expect_divided(self, divisor: float) -> None:
        """Once loaded: inputs come divided, by a power of two; the result is to be the same."""
        weight = self.weight
        (weight.payload if weight.scales is None else weight.scales).mul_(divisor)
        if weight.input_scale is not None:
            weight.input_scale.div_(divisor)
        if weight.activation_bound is not None:
            self.weight = replace(weight, activation_bound=weight.activation_bound / divisor)

    def prepare(self, ops: Ops) -> int:
        """Bring the loaded weight into the form that `ops` wants; bytes of the parameters."""
        self._parts = []  # they hold the weight as it was loaded
        self.weight = ops.prepare(self.weight)
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(
        self,
        x: Inputs,
        context: StepContext,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        residual: Tensor | None = None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """[T, in] -> [T, out], with what stands before and after it, so that it can be fused.

        Args:
            norm: an RMSNorm of `x`, applied first.
            silu: multiply the second half of the product by the SiLU of the first.
            residual: [T, out], to which the product is added; its memory may be used for that.
            added_to: [T, in], to which `x` is added before the norm, in place.
        """
        reduce = self.is_summed(context)
        own = residual if not reduce or context.group.has_stream else None
        y = self.partial(
            x,
            context,
            norm=norm,
            silu=silu,
            residual=own,
            added_to=added_to,
        )
        return context.group.all_reduce(y) if reduce else y

    def partial(
        self,
        x: Inputs,
        context: StepContext,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        residual: Tensor | None = None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """This rank's part of a row-parallel layer, with `residual` added in any case; the sum over
        the ranks is the caller's. A bias is in rank 0's part."""
        whole = not self._row_parallel or context.group.rank == 0
        return context.ops.linear(
            x,
            self.weight,
            self.bias if whole else None,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            silu=silu,
            residual=residual,
            added_to=added_to,
        )

    def feed(
        self,
        x: Tensor,
        context: StepContext,
        after: Linear,
        *,
        norm: Norm | None = None,
        added_to: Tensor | None = None,
    ) -> Inputs:
        """As a call with `silu`, in the form in which the product of `after` takes it."""
        return context.ops.feed(
            x,
            self.weight,
            self.bias,
            after.weight,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            added_to=added_to,
        )

    def room_for_heads(
        self, tokens: int, head_dim: int, context: StepContext
    ) -> QuantizedRows | None:
        """Where attention is to leave this product's inputs, if it is to quantize them."""
        return context.ops.room_for_heads(tokens, self.weight, head_dim)

    def is_summed(self, context: StepContext) -> bool:
        """Whether each rank has a part of the result."""
        return self._row_parallel and context.group.size > 1

    def defers_residual(self, tokens: int, context: StepContext) -> bool:
        """Whether a product of `tokens` rows is better added to the residual by the next norm."""
        if self.bias is not None or self.is_summed(context):
            return False
        return context.ops.defers_residual(tokens, self.weight)

    @staticmethod
    def projections(
        linears: Sequence[Linear], *, feed: Sequence[Linear] = (), residual: bool = False
    ) -> list[Projection]:
        """For the tuner: the same in several layers, those of each format by themselves.

        Args:
            feed: what they `feed`, each one of these. With a bias, SiLU is a kernel of its own.
            residual: this rank's products are added to something.
        """
        alike: dict[tuple[str, str], list[tuple[Linear, Linear | None]]] = defaultdict(list)
        for linear, fed in zip_longest(linears, feed):
            formats = linear.weight.format, "" if fed is None else fed.weight.format
            alike[formats].append((linear, fed))
        found = []
        for pairs in alike.values():
            first, fed = pairs[0]
            feeds = None if fed is None or first.bias is not None else fed.weight
            found.append(
                Projection(
                    [linear.weight for linear, _ in pairs],
                    silu=feeds is not None,
                    residual=residual,
                    biased=first.bias is not None,
                    normed=not first._row_parallel,
                    feeds=feeds,
                )
            )
        return found
