"""Decoders: their layers are built from the parts that a model's description names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.linear_candidates import Projection
from radixgrove.kernels.moe import ExpertWeights
from radixgrove.kernels.sample import VocabShard
from radixgrove.kernels.scaled import takes_heads
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import (
    Attention,
    ModelConfig,
    Norms,
    QkNorm,
    RopeConfig,
)
from radixgrove.worker.attention.base import AttentionBackend, AttentionBatch
from radixgrove.worker.models.context import StepContext, TensorPlacement
from radixgrove.worker.models.hugepages import use_huge_pages
from radixgrove.worker.models.kv_scales import KvScales
from radixgrove.worker.models.linear import Linear, Rows
from radixgrove.worker.models.mlp import FeedForward, Mixture
from radixgrove.worker.models.norms import Norm, WidthNorms, norm_part, norm_weight
from radixgrove.worker.models.ops import Inputs, Ops
from radixgrove.worker.models.parts import EMBEDDING, HEAD, WeightPart
from radixgrove.worker.models.residual import ResidualStream
from radixgrove.worker.models.rope import identity_table, rotary_order, rotary_table
from radixgrove.worker.models.stages import Stage
from radixgrove.worker.models.vocabulary import VocabTable

_QUANTIZED = {FLOAT8: "float8", torch.int8: "int8"}


class DecoderLayer:
    """Attention, and an MLP or experts, each with norms before or after it, and its residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        place: TensorPlacement,
        pool_index: int,
        table: int,
    ) -> None:
        """
        Args:
            index: of the layer in the model.
            pool_index: of its pages in the pool, which holds the layers of this stage.
            table: of the decoder's rotary tables.
        """
        prefix = f"model.layers.{index}"
        own = f"{prefix}.self_attn"
        hidden, attention = config.hidden_size, config.attention
        self._index = pool_index
        self._windowed = bool(attention.window_of(index))
        self._head_dim = attention.head_dim
        self._table = table
        self._qkv = Linear.column(place, hidden, _qkv_rows(attention, own), bias=attention.qkv_bias)
        self._output = Linear.row(
            place, f"{own}.o_proj", attention.queries, hidden, bias=attention.output_bias
        )
        names, stream = config.norms, stream_norms(config)

        def norm(name: str, norms: Norms) -> Norm | None:
            return Norm(place, f"{prefix}.{name}", hidden, norms) if name else None

        self._before_attention = norm(names.before_attention, stream)
        self._after_attention = norm(names.after_attention, names)
        self._before_mlp = norm(names.before_mlp, stream)
        self._after_mlp = norm(names.after_mlp, names)
        self.mlp: FeedForward | Mixture
        if experts := config.experts_of(index):
            self.mlp = Mixture(config, experts, prefix, place)
        else:
            self.mlp = FeedForward(config.mlp, hidden, f"{prefix}.mlp", place, self._after_mlp)
        per_head = attention.qk_norm is QkNorm.HEAD
        width, kind = attention.head_dim, names.kind
        self._q_norm = norm_weight(place, width, kind) if per_head else None
        self._k_norm = norm_weight(place, width, kind) if per_head else None
        self._norm_kind = kind
        self._qk_eps = names.eps
        self._sinks: Tensor | None = None
        if attention.sinks:
            window = place.group.shard.window(attention.heads)
            size = window.stop - window.start
            self._sinks = torch.empty(size, dtype=torch.float32, device=place.device)
            self._sinks_part = WeightPart(
                f"{own}.sinks", self._sinks, (attention.heads,), (window,), dummy=0.0
            )
        self._width_norms: WidthNorms | None = None
        if attention.qk_norm is QkNorm.WIDTH:
            widths = attention.queries, attention.keys
            self._width_norms = WidthNorms(own, place, *widths, names.eps)
        self._vectors = {
            f"{own}.q_norm": self._q_norm,
            f"{own}.k_norm": self._k_norm,
        }
        shard = place.group.shard
        self._queries = shard.split(attention.queries)[1]  # of a token, on this rank
        self._keys = shard.split(attention.keys)[1]
        rope = attention.rope_of(index)
        self._order = rotary_order(rope, attention.head_dim) if rope is not None else None
        required = bool(config.quantization and config.quantization.kv_scales)
        self._kv_scales = KvScales(own, required=required) if place.kv_scaled else None

    def _norms(self) -> Iterator[Norm]:
        before, after = self._before_attention, self._after_attention
        for norm in (before, after, self._before_mlp, self._after_mlp):
            if norm is not None:
                yield norm

    def parts(self) -> Iterator[WeightPart]:
        others = self._width_norms, self._kv_scales, *self._norms()
        for part in (self._qkv, self._output, self.mlp, *others):
            if part is not None:
                yield from part.parts()
        for name, vector in self._vectors.items():
            if vector is not None:
                yield norm_part(name, vector, self._norm_kind)
        if self._sinks is not None:
            yield self._sinks_part

    def matrices(self) -> list[Tensor]:
        """The weights of its products."""
        return [self._qkv.weight.payload, self._output.weight.payload, *self.mlp.matrices()]

    def prepare(self, ops: Ops) -> int:
        """See `Decoder.prepare`; bytes of the parameters."""
        if self._order is not None:
            self._reorder_heads(torch.tensor(self._order, device=self._qkv.weight.device))
        if self._kv_scales is not None:
            self._divide_kv(self._kv_scales.keys, self._kv_scales.values)
        vectors = sum(vector.nbytes for vector in self._vectors.values() if vector is not None)
        if self._width_norms is not None:
            vectors += self._width_norms.nbytes
        if self._sinks is not None:
            vectors += self._sinks.nbytes
        vectors += sum(norm.nbytes for norm in self._norms())
        return vectors + sum(x.prepare(ops) for x in (self._qkv, self._output, self.mlp))

    def _reorder_heads(self, order: Tensor) -> None:
        """Dimensions of each head of queries and keys; see `rotary_order`."""

        def of_heads(values: int) -> Tensor:
            return (
                torch.arange(0, values, len(order), device=order.device)[:, None] + order
            ).flatten()

        self._qkv.reorder_outputs(of_heads(self._queries + self._keys))
        norms: Sequence[Tensor | None] = self._q_norm, self._k_norm
        if self._width_norms is not None:
            norms = self._width_norms.weights
        for weight in norms:
            if weight is not None:
                weight.copy_(weight[of_heads(len(weight))])

    def _divide_kv(self, keys: float, values: float) -> None:
        """Keys and values by these, and what becomes of them in turn."""
        behind = self._queries + self._keys
        self._qkv.scale_outputs(slice(behind, behind + self._keys), 1 / values)
        self._output.expect_divided(values)
        norms: Sequence[Tensor | None] = self._q_norm, self._k_norm
        if self._width_norms is not None:
            norms = self._width_norms.weights
        of_queries, of_keys = norms
        if of_queries is not None and of_keys is not None:
            of_queries.mul_(keys)
            of_keys.div_(keys)
        else:
            self._qkv.scale_outputs(slice(0, self._queries), keys)
            self._qkv.scale_outputs(slice(self._queries, behind), 1 / keys)

    @property
    def takes_heads(self) -> bool:
        """Whether attention may leave its result quantized, head by head."""
        return takes_heads(self._output.weight, self._head_dim)

    @staticmethod
    def projections(layers: Sequence[DecoderLayer], *, residual: bool) -> list[Projection]:
        """For the tuner: the products of these layers' attention.

        Args:
            residual: this rank's parts are added to something.
        """
        return [
            *Linear.projections([layer._qkv for layer in layers]),
            *Linear.projections([layer._output for layer in layers], residual=residual),
        ]

    def __call__(
        self, stream: ResidualStream, context: StepContext, wanted: Tensor | None = None
    ) -> None:
        """Add this layer's part to the stream.

        Args:
            wanted: [S] int64; the last layer goes on with these positions only, once the KV of all
                is stored.
        """
        qkv = stream.into(self._qkv, context, self._before_attention)
        attended = self._attend(qkv, context, wanted)
        if wanted is not None:
            stream.select(wanted, context)
        if attended is None:
            return
        stream.add(self._output, attended, context, norm=self._after_attention)
        self.mlp(stream, context, self._before_mlp)

    def _attend(self, qkv: Tensor, context: StepContext, wanted: Tensor | None) -> Inputs | None:
        """Store K and V and attend: [T, H * D], or [S, H * D] at the wanted positions if any."""
        attention = context.attention
        norms = self._q_norm, self._k_norm, self._qk_eps
        rotation = context.rotations[self._table]
        nothing_wanted = wanted is not None and not wanted.shape[0]
        if self._width_norms is not None:
            self._width_norms(qkv, context)
        if context.await_layer is not None:
            context.await_layer(self._index)
        if attention.takes_qkv:
            rows = None
            if wanted is None:
                head_dim = attention.pages[self._index].shape[-1]
                rows = self._output.room_for_heads(len(qkv), head_dim, context)
            attended = attention.attend_qkv(
                self._index, qkv, rotation, *norms, quantized=rows, sinks=self._sinks
            )
            if rows is not None:
                return rows
        else:
            pages = attention.pages[self._index]
            slots = context.window_slots if self._windowed else context.slots
            q = context.ops.rope_store(qkv, rotation, slots, pages, *norms)
            if nothing_wanted:
                return None
            kv = qkv.view(qkv.shape[0], -1, q.shape[2])[:, q.shape[1] :]
            attended = attention.attend(self._index, q, kv, self._sinks)
        if wanted is None:
            return attended.flatten(1)
        return None if nothing_wanted else attended.flatten(1).index_select(0, wanted)


def _distinct(ropes: Iterable[RopeConfig | None]) -> list[RopeConfig | None]:
    found: list[RopeConfig | None] = []
    for rope in ropes:
        if rope not in found:
            found.append(rope)
    return found


def _qkv_rows(attention: Attention, prefix: str) -> list[Rows]:
    """Of the tensors that have them; `prefix`: of the names of attention's."""
    sizes = attention.queries, attention.keys, attention.keys
    if attention.fused:
        return Rows.stacked(f"{prefix}.{attention.fused}", sizes)
    names = (f"{prefix}.{name}_proj" for name in "qkv")
    return [Rows.own(name, size) for name, size in zip(names, sizes, strict=True)]


def stream_norms(config: ModelConfig) -> Norms:
    """Of norms of the residual stream, which is kept divided by the multiplier of what joins it:
    that is then added as it is, and a norm takes no notice of a factor but for its epsilon."""
    return replace(config.norms, eps=config.norms.eps / config.multipliers.residual**2)


class Decoder:
    """Token ids to hidden states to logits; parameters are allocated here, filled by `weights`.

    In a pipeline it is one stage of that: the first embeds, the last has the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: TensorPlacement,
        ops: Ops,
        known_tokens: int | None = None,
        stage: Stage | None = None,
    ) -> None:
        """
        Args:
            stage: which layers; None: all.
            known_tokens: ids from here on are padding of the vocabulary, without logits; None:
                there is none.
        """
        self.config = config
        self.known_tokens = min(known_tokens or config.vocab_size, config.vocab_size)
        self.group = place.group
        self.dtype = place.dtype
        self.device = place.device
        self._ops = ops
        self.stage = stage = stage or Stage.whole(config)
        sizes = config.vocab_size, config.hidden_size
        self._embedding = VocabTable(place, EMBEDDING, *sizes) if stage.embeds else None
        self._head: VocabTable | None = None
        if stage.has_head:
            self._head = self._embedding if config.tied_embeddings else None
            if self._head is None:
                name = EMBEDDING if config.tied_embeddings else HEAD
                self._head = VocabTable(place, name, *sizes)
        self._ropes = _distinct(map(config.attention.rope_of, stage.layers))
        self._layers = [
            DecoderLayer(
                config,
                index,
                place,
                index - stage.layers.start,
                self._ropes.index(config.attention.rope_of(index)),
            )
            for index in stage.layers
        ]
        self._norm: Norm | None = None
        if stage.has_head:
            self._norm = Norm(place, "model.norm", config.hidden_size, stream_norms(config))
        factor = config.multipliers.embedding / config.multipliers.residual
        if config.multipliers.embedding_in_dtype:
            factor = torch.tensor(factor, dtype=place.dtype).item()
        self._embedding_factor = factor
        self.weights_bytes = 0  # of this rank's parameters; known after `prepare`
        self._mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, Mixture)]
        self.expert_load = self._count_experts()
        self._tables = self._rotary_tables()

    def parts(self) -> Iterator[WeightPart]:
        """Every tensor that a checkpoint must have for this rank."""
        if self._embedding is not None:
            yield from self._embedding.parts()
        for layer in self._layers:
            yield from layer.parts()
        if self._norm is not None:
            yield from self._norm.parts()
        if self._head is not None and self._head is not self._embedding:
            yield from self._head.parts()

    def projections(self) -> list[Projection]:
        """What the tuner measures: each kind of product, over all layers, and the head."""
        residual = self.group.has_stream
        found = DecoderLayer.projections(self._layers, residual=residual)
        mlps = [layer.mlp for layer in self._layers if isinstance(layer.mlp, FeedForward)]
        found += FeedForward.projections(mlps, residual=residual)
        found += Mixture.projections(self._mixtures)
        if self._head is not None:
            wide = self.logits_dtype != self.dtype
            head = Weight.plain(self._head.weight)
            found.append(Projection([head], every_token=False, wide=wide))
        return found

    def experts(self) -> tuple[list[ExpertWeights], int, bool]:
        """For the tuner: this rank's experts of each layer with some, how many there are in all,
        and whether what they come to is added to something here."""
        count = self.config.experts.count if self.config.experts else 0
        return [mixture.weights for mixture in self._mixtures], count, self.group.has_stream

    def _rotary_tables(self) -> list[Tensor]:
        sizes = self.config.attention.head_dim, self.config.max_position_embeddings, self.device
        return [
            identity_table(*sizes) if rope is None else rotary_table(rope, *sizes)
            for rope in self._ropes
        ]

    def _count_experts(self) -> Tensor | None:
        """[layers, experts] int64 to which steps add each expert's tokens; every rank routes all
        tokens, so that one of them counts."""
        experts = self.config.experts
        if experts is None or not self._mixtures or self.group.rank:
            return None
        load = torch.zeros(
            (len(self._mixtures), experts.count), dtype=torch.int64, device=self.device
        )
        for mixture, row in zip(self._mixtures, load.unbind(), strict=True):
            mixture.count_in(row)
        return load

    def prepare(self) -> None:
        """After loading: bring every weight into the form that the arithmetic wants."""
        matrices = []
        self.weights_bytes = sum(layer.prepare(self._ops) for layer in self._layers)
        for layer in self._layers:
            matrices += layer.matrices()
        if self._head is not None and self._norm is not None:
            tied = self._head is self._embedding
            head = self._head.prepare_head(self._ops, embeds=tied)
            if not tied:
                head = head or self._head.weight.nbytes
            self.weights_bytes += head + self._norm.nbytes
            matrices.append(self._head.head.payload)
        if self._embedding is not None:
            self.weights_bytes += self._embedding.weight.nbytes
        if self.device.type == "cpu":
            use_huge_pages(matrices)

    @property
    def quantizes_heads(self) -> bool:
        """Whether attention of some layer may leave its result quantized, head by head."""
        return any(layer.takes_heads for layer in self._layers)

    @property
    def expert_bytes(self) -> int:
        """Of the experts that tokens choose, on this rank; known after `prepare`."""
        return sum(mixture.expert_bytes for mixture in self._mixtures)

    @property
    def quantized_bytes(self) -> dict[str, int]:
        """Of this rank's projections in each format of eight bits; known after `prepare`."""
        found = dict.fromkeys(_QUANTIZED.values(), 0)
        for matrix in (matrix for layer in self._layers for matrix in layer.matrices()):
            if name := _QUANTIZED.get(matrix.dtype):
                found[name] += matrix.nbytes
        return found

    def hidden_states(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
        embedded: Tensor | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """One forward pass over a planned batch.

        Args:
            token_ids: [T] int32 or int64.
            batch: geometry for which `attention.plan` has been called.
            wanted: [S] int64, positions in the step: their states are returned; all when None.
            embedded: [T, hidden], rows of `embedding` for the tokens, if at hand, or what the stage
                before has made of them; overwritten.
            await_layer: called with a layer's index before it reads its pages, which may not be
                there yet: makes the current stream wait for them.

        Returns:
            [S, hidden] or [T, hidden], for the stage after, or before the final norm, which
            `logits` applies.
        """
        rotations = [
            self._ops.rotation(table, batch.positions, self.dtype) for table in self._tables
        ]
        context = StepContext(
            self.group,
            self._ops,
            attention,
            rotations,
            batch.slots,
            batch.slots if batch.window_slots is None else batch.window_slots,
            await_layer,
        )
        if embedded is None:
            assert self._embedding is not None, "a later stage gets what the one before made"
            embedded = self._embedding.embed(token_ids, context)
            if self._embedding_factor != 1.0:
                embedded.mul_(self._embedding_factor)
        stream = ResidualStream(embedded)
        for layer in self._layers[:-1]:
            layer(stream, context)
        self._layers[-1](stream, context, wanted)
        return stream.value(context)

    @property
    def embedding(self) -> Tensor | None:
        """The embeddings of all tokens as they are added to the stream, [vocab_size, hidden]; None
        where ranks share them, another stage has them, or there is a multiplier."""
        whole = self.group.size == 1 and self._embedding_factor == 1.0
        return self._embedding.weight if self._embedding and whole else None

    @property
    def logits_dtype(self) -> torch.dtype:
        return self._ops.logits_dtype(self.dtype)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Final norm and head: [N, hidden] -> [N, known_tokens], whole on every rank.

        Args:
            out: [N, vocab_size], where to leave them, `logits_dtype`.
        """
        head, norm = self._ending
        logits = self._scaled(head.logits(hidden, norm, self._ops, self.group, out))
        return logits[:, : self.known_tokens]

    def vocab_shard(self) -> VocabShard | None:
        """To draw from `part_of_logits`; None where that takes whole logits."""
        head, _ = self._ending
        last = (self.group.size - 1) * head.part_size
        return self.group.vocab_shard(head.first) if last < self.known_tokens else None

    @property
    def vocab_part(self) -> int:
        """Tokens of a rank's part of the vocabulary, padding included."""
        return self._ending[0].part_size

    def part_of_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Final norm and head: [N, hidden] -> [N, known tokens of this rank's part].

        Args:
            out: [N, vocab_part], where to leave them, `logits_dtype`.
        """
        head, norm = self._ending
        return self.known_part(self._scaled(head.part(hidden, norm, self._ops, out)))

    def known_part(self, part: Tensor) -> Tensor:
        """[N, vocab_part] without what is padding of the vocabulary."""
        return part[:, : self.known_tokens - self._ending[0].first]

    def whole_logits(self, part: Tensor, out: Tensor) -> Tensor:
        """[N, vocab_part] of every rank -> [N, known_tokens] on every rank; `out` as `logits`."""
        head, _ = self._ending
        return head.whole(part, self.group, out)[:, : self.known_tokens]

    @property
    def _ending(self) -> tuple[VocabTable, Norm]:
        assert self._head is not None, "the last stage has the head"
        assert self._norm is not None
        return self._head, self._norm

    def _scaled(self, logits: Tensor) -> Tensor:
        factor = self.config.multipliers.logits
        return logits if factor == 1.0 else logits.mul_(factor)
