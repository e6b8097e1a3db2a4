"""The residual stream: how norms read it, and how the results of layers join it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from radixgrove.kernels.moe import ExpertWeights
from radixgrove.kernels.weight import QuantizedRows
from radixgrove.worker.models.context import StepContext
from radixgrove.worker.models.linear import Linear
from radixgrove.worker.models.norms import Norm
from radixgrove.worker.models.ops import Inputs


class ResidualStream:
    """[T, hidden]: norms of it go into a layer's products, and their results are added to it.

    Two things may be left to the norm after an addition, which reads the stream anyhow: the
    addition itself, which with many tokens can cost less there than at the end of the product, and
    the sum over the ranks.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._pending: Tensor | None = None  # to be added
        # To be summed over the ranks: the stream is in rank 0's.
        self._partial: Tensor | None = None

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
        the stream on the rank that has it, and none elsewhere."""
        value = self.value(context)
        self._partial = add(value if context.group.has_stream else None)

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
