"""The decoder's layers with weights: each takes the step's context, and knows its shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from radixgrove.kernels.linear_candidates import Projection
from radixgrove.kernels.float8 import bits
from radixgrove.kernels.moe import ExpertWeights
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.config import ModelError, NormKind, Norms
from radixgrove.worker.attention.base import AttentionBackend
from radixgrove.worker.models.formats.base import (
    ALL_UNQUANTIZED,
    Formats,
    fused_shape,
    placed,
)
from radixgrove.worker.models.ops import Inputs, Ops, Rotation
from radixgrove.worker.models.parts import Piece, WeightPart
from radixgrove.worker.parallel.group import TensorParallel


@dataclass(slots=True)
class StepContext:
    """What a layer needs to know of the step beside its input."""

    group: TensorParallel
    ops: Ops
    attention: AttentionBackend
    rotations: Sequence[Rotation]  # of rotary tables, of which a layer knows its own
    slots: Tensor  # [T] int64: where K and V of each token go
    await_layer: Callable[[int], None] | None = None  # called before a layer reads its pages


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where parameters are allocated, and in which formats."""

    group: TensorParallel
    dtype: torch.dtype
    device: torch.device
    formats: Formats = ALL_UNQUANTIZED  # of projections
    ep: int = 1  # groups of the ranks, which hold different experts
    kv_scaled: bool = False  # KV is kept in float8, by the checkpoint's scales if it has any

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


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


def norm_weight(place: TensorPlacement, width: int, kind: NormKind) -> Tensor:
    """Of an RMSNorm or a LayerNorm; in float32 where the checkpoint's is 1 less, which has more
    digits than the sum would keep."""
    if kind is not NormKind.RMS_OF_ONE:
        return place.empty(width)
    return torch.empty(width, dtype=torch.float32, device=place.device)


def norm_part(name: str, weight: Tensor, kind: NormKind) -> WeightPart:
    """What fills a weight of `norm_weight`."""

    def store(window: Tensor) -> None:
        weight.copy_(window).add_(1.0)

    return WeightPart(
        f"{name}.weight",
        weight,
        tuple(weight.shape),
        store=store if kind is NormKind.RMS_OF_ONE else None,
        dummy=1.0,
    )


class Norm:
    """Of the residual stream, or of what is to join it."""

    def __init__(self, place: TensorPlacement, name: str, width: int, norms: Norms) -> None:
        """
        Args:
            name: in the checkpoint, without `.weight`.
        """
        self.eps = norms.eps
        self._kind = norms.kind
        self.weight = norm_weight(place, width, norms.kind)
        self._bias = place.empty(width) if norms.kind is NormKind.LAYER else None
        self._name = name

    @property
    def is_rms(self) -> bool:
        """Whether products can take it into their beginning."""
        return self._bias is None

    def parts(self) -> Iterator[WeightPart]:
        yield norm_part(self._name, self.weight, self._kind)
        if self._bias is not None:
            shape = tuple(self._bias.shape)
            yield WeightPart(f"{self._name}.bias", self._bias, shape, dummy=0.0)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, width] -> [T, width]."""
        if self._bias is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self._bias, self.eps)


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
        layout = place.formats.of([piece.prefix for piece in pieces])
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
        # The sum over the ranks takes in the residual once, from rank 0.
        own = residual if not reduce or context.group.rank == 0 else None
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
    def projections(linears: Sequence[Linear], *, feed: Sequence[Linear] = ()) -> list[Projection]:
        """For the tuner: the same in several layers, those of each format by themselves.

        Args:
            feed: what they `feed`, each one of these. With a bias, SiLU is a kernel of its own.
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
                    residual=first._row_parallel,
                    biased=first.bias is not None,
                    feeds=feeds,
                )
            )
        return found


class WidthNorms:
    """RMSNorms of queries and keys over all heads of a token, those of other ranks too."""

    def __init__(
        self, prefix: str, place: TensorPlacement, queries: int, keys: int, eps: float
    ) -> None:
        """
        Args:
            queries, keys: values of all their heads.
        """
        self._widths = queries, keys
        self._eps = eps
        self._parts = []
        self._weights = []
        for name, width in zip(("q_norm", "k_norm"), self._widths, strict=True):
            start, length = place.group.shard.split(width)
            weight = place.empty(length)
            self._weights.append(weight)
            window = (slice(start, start + length),)
            self._parts.append(
                WeightPart(f"{prefix}.{name}.weight", weight, (width,), window, dummy=1.0)
            )

    def parts(self) -> Iterator[WeightPart]:
        yield from self._parts

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    @property
    def weights(self) -> Sequence[Tensor]:
        """This rank's, of queries and of keys."""
        return self._weights

    def __call__(self, qkv: Tensor, context: StepContext) -> None:
        """Norm the queries and keys of [T, queries + keys + values] of this rank, in place."""
        first, second = (len(weight) for weight in self._weights)
        halves = qkv[:, :first], qkv[:, first : first + second]
        if context.group.size == 1:
            for half, weight in zip(halves, self._weights, strict=True):
                half.copy_(context.ops.rms_norm(half, weight, self._eps))
            return
        squares = [half.float().square().sum(-1, keepdim=True) for half in halves]
        total = context.group.all_reduce(torch.cat(squares, -1))
        scales = (total / total.new_tensor(self._widths) + self._eps).rsqrt_()
        for index, (half, weight) in enumerate(zip(halves, self._weights, strict=True)):
            half.copy_(half.float() * scales[:, index : index + 1] * weight.float())


class ResidualStream:
    """[T, hidden]: norms of it go into a layer's products, and their results are added to it.

    Two things may be left to the norm after an addition, which reads the stream anyhow: the
    addition itself, which with many tokens can cost less there than at the end of the product, and
    the sum over the ranks.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._pending: Tensor | None = None  # to be added
        self._partial: Tensor | None = (
            None  # to be summed over the ranks: the stream is in rank 0's
        )

    def into(self, linear: Linear, context: StepContext, norm: Norm | None) -> Tensor:
        """`linear` of the stream's norm, or of the stream."""
        x, within, added_to = self._take(linear, context, norm)
        return linear(x, context, norm=within, added_to=added_to)

    def feed(
        self, linear: Linear, after: Linear, context: StepContext, norm: Norm | None
    ) -> Inputs:
        """What `linear` of the stream's norm, or of the stream, feeds to `after`."""
        x, within, added_to = self._take(linear, context, norm)
        return linear.feed(x, context, after, norm=within, added_to=added_to)

    def _take(
        self, linear: Linear, context: StepContext, norm: Norm | None
    ) -> tuple[Tensor, Norm | None, Tensor | None]:
        """The inputs of `linear`, a norm of them that is left to it, and what it first adds them
        to."""
        if norm is None or not norm.is_rms:
            return self.normed(context, norm), None, None
        if self._partial is not None and not linear.weight.quantized:
            x = self._summed_norm(self._partial, context, norm)
            if x is not None:
                return x, None, None
        self._sum(context)
        pending, self._pending = self._pending, None
        if pending is None:
            return self._value, norm, None
        return pending, norm, self._value

    def normed(self, context: StepContext, norm: Norm | None) -> Tensor:
        """The stream's norm, for several products."""
        if norm is None:
            return self.value(context)
        if self._partial is not None and norm.is_rms:
            x = self._summed_norm(self._partial, context, norm)
            if x is not None:
                return x
        self._sum(context)
        if self._pending is None or not norm.is_rms:
            return norm(self.value(context), context.ops)
        x = context.ops.add_rms_norm(self._pending, self._value, norm.weight, norm.eps)
        self._pending = None
        return x

    def normed_for(
        self, experts: ExpertWeights, count: int, context: StepContext, norm: Norm | None
    ) -> tuple[Tensor, QuantizedRows | None]:
        """The stream's norm for a router of `count` experts, and quantized where this rank's
        experts want that."""
        if norm is None or not norm.is_rms or self._partial is not None:
            return self.normed(context, norm), None
        pending, self._pending = self._pending, None
        x, added_to = (self._value, None) if pending is None else (pending, self._value)
        return context.ops.norm_for_experts(x, norm.weight, norm.eps, experts, count, added_to)

    def add_partial(self, add: Callable[[Tensor | None], Tensor], context: StepContext) -> None:
        """Add what each rank has a part of: `add` takes the tensor to add its part to, which is
        the stream on rank 0, and none elsewhere."""
        value = self.value(context)
        self._partial = add(value if context.group.rank == 0 else None)

    def add(
        self,
        linear: Linear,
        x: Inputs,
        context: StepContext,
        *,
        norm: Norm | None = None,
    ) -> None:
        """Add `linear(x)`, or its norm."""
        if norm is not None:
            self._pending = norm(linear(x, context), context.ops)
        elif linear.defers_residual(x.shape[0], context):
            self._pending = linear(x, context)
        elif linear.is_summed(context):
            self.add_partial(
                lambda residual: linear.partial(x, context, residual=residual), context
            )
        else:
            self._value = linear(x, context, residual=self._value)

    def select(self, wanted: Tensor, context: StepContext) -> None:
        """Go on with these positions only."""
        self._value = self.value(context).index_select(0, wanted)

    def value(self, context: StepContext) -> Tensor:
        self._sum(context)
        if self._pending is not None:
            self._value.add_(self._pending)
            self._pending = None
        return self._value

    def _sum(self, context: StepContext) -> None:
        if self._partial is not None:
            self._value = context.group.all_reduce(self._partial)
            self._partial = None

    def _summed_norm(self, partial: Tensor, context: StepContext, norm: Norm) -> Tensor | None:
        """The norm of the stream, and the sum over the ranks, where one kernel makes both."""
        both = context.group.all_reduce_norm(partial, norm.weight, norm.eps)
        if both is None:
            return None
        self._partial = None
        self._value, x = both
        return x


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
