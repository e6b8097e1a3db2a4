"""What follows attention in a layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from radixgrove.kernels.linear_candidates import Projection
from radixgrove.kernels.moe import ExpertWeights
from radixgrove.kernels.routing import Router, Routing
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import Activation, ExpertsConfig, Mlp, ModelConfig
from radixgrove.worker.models.context import StepContext, TensorPlacement
from radixgrove.worker.models.expert_pieces import ExpertPieces
from radixgrove.worker.models.linear import Linear, Rows
from radixgrove.worker.models.norms import Norm
from radixgrove.worker.models.ops import Inputs, Ops
from radixgrove.worker.models.parts import WeightPart
from radixgrove.worker.models.residual import ResidualStream
from radixgrove.worker.parallel.experts import ExpertPlacement


class FeedForward:
    """An MLP of one hidden layer; see `Mlp`."""

    def __init__(
        self,
        mlp: Mlp,
        hidden: int,
        prefix: str,
        place: TensorPlacement,
        after: Norm | None = None,
    ) -> None:
        """
        Args:
            after: of what joins the stream.
        """
        rows = _gate_and_up(mlp, prefix)
        self.gate_up = Linear.column(place, hidden, rows, bias=mlp.bias)
        self.down = Linear.row(place, f"{prefix}.{mlp.down}", mlp.width, hidden, bias=mlp.bias)
        self._gated = bool(mlp.gate)
        self._activation = mlp.activation
        self._after = after

    @property
    def _has_silu(self) -> bool:
        """Whether a product can take the activation into its ending."""
        return self._gated and self._activation is Activation.SILU

    def parts(self) -> Iterator[WeightPart]:
        yield from self.gate_up.parts()
        yield from self.down.parts()

    def matrices(self) -> list[Tensor]:
        """The weights of its products."""
        return [self.gate_up.weight.payload, self.down.weight.payload]

    def prepare(self, ops: Ops) -> int:
        """See `Decoder.prepare`; bytes of the parameters."""
        return self.gate_up.prepare(ops) + self.down.prepare(ops)

    @staticmethod
    def projections(layers: Sequence[FeedForward], *, residual: bool) -> list[Projection]:
        """For the tuner: what these have in common.

        Args:
            residual: this rank's parts are added to something.
        """
        feeding = [layer for layer in layers if layer._has_silu]
        others = [layer.gate_up for layer in layers if not layer._has_silu]
        return [
            *Linear.projections(
                [layer.gate_up for layer in feeding], feed=[layer.down for layer in feeding]
            ),
            *Linear.projections(others),
            *Linear.projections([layer.down for layer in layers], residual=residual),
        ]

    def __call__(self, stream: ResidualStream, context: StepContext, norm: Norm | None) -> None:
        """Add it, of the stream's norm, to the stream."""
        inner: Inputs
        if self._has_silu:
            inner = stream.feed(self.gate_up, self.down, context, norm)
        else:
            inner = stream.into(self.gate_up, context, norm)
            inner = _activated(inner, self._activation, gated=self._gated)
        stream.add(self.down, inner, context, norm=self._after)


def _gate_and_up(mlp: Mlp, prefix: str) -> list[Rows]:
    if mlp.gate == mlp.up:
        return Rows.stacked(f"{prefix}.{mlp.up}", [mlp.width, mlp.width])
    names = filter(None, (mlp.gate, mlp.up))
    return [Rows.own(f"{prefix}.{name}", mlp.width) for name in names]


def _activated(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """Of [T, N], or of the first half of [T, 2 N], times the second: [T, N]."""
    first, second = x.chunk(2, dim=-1) if gated else (x, None)
    silu = activation is Activation.SILU
    y = F.silu(first) if silu else F.gelu(first, approximate="tanh")
    return y if second is None else y.mul_(second)


class Mixture:
    """Experts, of which every token takes a few, and maybe one that all take.

    The router sees all experts; this rank computes those that it holds.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, layer: str, place: TensorPlacement
    ) -> None:
        """
        Args:
            layer: prefix of the layer's names.
        """
        prefix, hidden = f"{layer}.{experts.names.block}", config.hidden_size
        placement = ExpertPlacement.even(experts.count, place.ep)
        group, shard = placement.group_of(place.group.shard)
        held = placement.held(group)
        pieces = ExpertPieces(experts, layer, hidden, shard.window(experts.intermediate_size))
        layout = place.formats.of(pieces.gate_up(held[0])[0].prefix)
        where = place.dtype, place.device, (len(held),)
        gate_up = layout.allocate(pieces.gate_up(held[0]), *where)
        down = layout.allocate(pieces.down(held[0]), *where)
        self._gate = Weight.plain(place.empty(experts.count, hidden))
        self._gate_bias: Tensor | None = None
        if experts.router_bias:
            self._gate_bias = torch.empty(experts.count, dtype=torch.float32, device=place.device)
        self._parts = list(self._router_parts(f"{prefix}.{experts.names.router}", layer))
        for index, expert in enumerate(held):
            for weight, own in (gate_up, pieces.gate_up(expert)), (down, pieces.down(expert)):
                parts = layout.parts(weight[index], own)
                self._parts += pieces.where_saved(parts, expert, own)
        gate_up_bias = down_bias = None
        if experts.bias:
            gate_up_bias = place.empty(len(held), gate_up.shape[0])
            # Ranks that share an expert's width sum what it comes to: one of them adds the bias.
            down_bias = place.empty(len(held), hidden) if shard.rank == 0 else None
            self._parts += pieces.biases(held, gate_up_bias, down_bias)
        places = None
        if placement.groups > 1:
            places = torch.tensor(placement.places(group), dtype=torch.int32, device=place.device)
        self._weights = ExpertWeights(
            gate_up,
            down,
            Router(Routing(experts.per_token, renormalize=experts.renormalize), places=places),
            gate_up_bias,
            down_bias,
            experts.clamped,
        )
        self._shared: FeedForward | None = None
        if experts.shared_size:
            mlp = replace(config.mlp, width=experts.shared_size)
            self._shared = FeedForward(mlp, hidden, f"{prefix}.shared_expert", place)
            self._shared_gate = Weight.plain(place.empty(1, hidden))
            name, gate = f"{prefix}.shared_expert_gate.weight", self._shared_gate.payload
            self._parts.append(WeightPart(name, gate, (1, hidden)))

    def _router_parts(self, prefix: str, layer: str) -> Iterator[WeightPart]:
        """`prefix`: of the names of the router's tensors."""
        weight = self._gate.payload
        alias = f"{layer}.mlp.gate.weight"
        yield WeightPart(f"{prefix}.weight", weight, tuple(weight.shape), aliases=(alias,))
        if (bias := self._gate_bias) is not None:
            yield WeightPart(f"{prefix}.bias", bias, tuple(bias.shape), dummy=0.0)

    def parts(self) -> Iterator[WeightPart]:
        yield from self._parts
        if self._shared is not None:
            yield from self._shared.parts()

    def matrices(self) -> list[Tensor]:
        """The weights of its products."""
        shared = self._shared.matrices() if self._shared else []
        experts = self._weights.gate_up.payload, self._weights.down.payload
        return [self._gate.payload, *experts, *shared]

    def count_in(self, load: Tensor) -> None:
        """Add the tokens that each expert is given to `load`, [experts] int64, from now on."""
        router = replace(self._weights.router, load=load)
        self._weights = replace(self._weights, router=router)

    @property
    def weights(self) -> ExpertWeights:
        """This rank's experts, for the tuner."""
        return self._weights

    @property
    def expert_bytes(self) -> int:
        """Of the experts that tokens choose, on this rank."""
        return self._weights.nbytes

    def prepare(self, ops: Ops) -> int:
        """See `Decoder.prepare`; bytes of the parameters."""
        self._parts = []  # they hold the weights as they were loaded
        self._weights = ops.prepare_experts(self._weights)
        size = self._gate.nbytes + self.expert_bytes
        if self._gate_bias is not None:
            size += self._gate_bias.nbytes
        if self._shared is not None:
            size += self._shared.prepare(ops) + self._shared_gate.nbytes
        return size

    @staticmethod
    def projections(layers: Sequence[Mixture]) -> list[Projection]:
        """For the tuner: the dense products that these have in common."""
        if not layers:
            return []
        shared = [layer._shared for layer in layers if layer._shared is not None]
        router = Projection([layer._gate for layer in layers], wide=True, normed=False)
        # Every rank adds its part to what its experts come to, the product itself where it can.
        adding = [layer for layer in shared if layer.down.weight.scales_with_inputs]
        others = [layer for layer in shared if not layer.down.weight.scales_with_inputs]
        return [
            router,
            *FeedForward.projections(adding, residual=True),
            *FeedForward.projections(others, residual=False),
        ]

    def __call__(self, stream: ResidualStream, context: StepContext, norm: Norm | None) -> None:
        """Add it, of the stream's norm, to the stream."""
        x, rows = stream.normed_for(self._weights, self._gate.shape[0], context, norm)

        def add(residual: Tensor | None) -> Tensor:
            logits = context.ops.wide_linear(x, self._gate)
            if self._gate_bias is not None:
                logits.add_(self._gate_bias)
            y = context.ops.experts(x, logits, self._weights, residual, rows)
            return y if self._shared is None else self._add_shared(self._shared, x, y, context)

        stream.add_partial(add, context)

    def _add_shared(
        self, shared: FeedForward, x: Tensor, y: Tensor, context: StepContext
    ) -> Tensor:
        share = context.ops.wide_linear(x, self._shared_gate).sigmoid_()
        h = shared.gate_up(x, context, silu=True)
        share = share.to(h.dtype)
        if shared.down.weight.scales_with_inputs:  # which have fewer numbers for each token
            return shared.down.partial(h.mul_(share), context, residual=y)
        return y.addcmul_(shared.down.partial(h, context), share)
