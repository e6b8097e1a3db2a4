"""Norms with weights: of the residual stream and what joins it, and of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from radixgrove.protocol.model.config import NormKind, Norms
from radixgrove.worker.models.context import StepContext, TensorPlacement
from radixgrove.worker.models.ops import Ops
from radixgrove.worker.models.parts import WeightPart


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
