"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only in their config."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from radixgrove.worker.execution.attention.base import AttentionBackend, AttentionBatch
from radixgrove.worker.models.config import ModelConfig
from radixgrove.worker.models.layers import (
    Linear,
    Placement,
    StepContext,
    VocabTable,
    WeightPart,
)
from radixgrove.worker.models.ops import Ops
from radixgrove.worker.models.rope import rotary_table


class DecoderLayer:
    """Attention and gated MLP, each with its norm before and its residual after."""

    def __init__(self, config: ModelConfig, index: int, place: Placement) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self._index = index
        self._eps = config.norm_eps
        self._qkv = Linear.column(
            place,
            hidden,
            {
                f"{attention}.q_proj": config.num_heads * head_dim,
                f"{attention}.k_proj": config.num_kv_heads * head_dim,
                f"{attention}.v_proj": config.num_kv_heads * head_dim,
            },
            bias=config.qkv_bias,
        )
        self._output = Linear.row(
            place,
            f"{attention}.o_proj",
            config.num_heads * head_dim,
            hidden,
            bias=config.output_bias,
        )
        self._gate_up = Linear.column(
            place,
            hidden,
            {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner},
            bias=config.mlp_bias,
        )
        self._down = Linear.row(place, f"{mlp}.down_proj", inner, hidden, bias=config.mlp_bias)
        self.input_norm = place.empty(hidden)
        self._mlp_norm = place.empty(hidden)
        self._q_norm = place.empty(head_dim) if config.qk_norm else None
        self._k_norm = place.empty(head_dim) if config.qk_norm else None
        self._vectors = {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self._mlp_norm,
            f"{attention}.q_norm.weight": self._q_norm,
            f"{attention}.k_norm.weight": self._k_norm,
        }

    def parts(self) -> Iterator[WeightPart]:
        for linear in (self._qkv, self._output, self._gate_up, self._down):
            yield from linear.parts()
        for name, vector in self._vectors.items():
            if vector is not None:
                yield WeightPart(name, vector, tuple(vector.shape))

    def __call__(
        self, x: Tensor, residual: Tensor, next_norm: Tensor, context: StepContext
    ) -> Tensor:
        """Normalised input of this layer -> that of the next; `residual` is updated in place."""
        ops, attention = context.ops, context.attention
        q = ops.rope_store(
            self._qkv(x, context),
            context.rotation,
            context.slots,
            attention.pool[self._index],
            self._q_norm,
            self._k_norm,
            self._eps,
        )
        attended = attention.attend(self._index, q).flatten(1)
        x = self._output(attended, context)
        x = ops.add_rms_norm(x, residual, self._mlp_norm, self._eps)
        x = self._down(ops.silu_and_mul(self._gate_up(x, context)), context)
        return ops.add_rms_norm(x, residual, next_norm, self._eps)


class Decoder:
    """Token ids to hidden states to logits; parameters are allocated here, filled by `weights`."""

    def __init__(self, config: ModelConfig, place: Placement, ops: Ops) -> None:
        self.config = config
        self.group = place.group
        self.dtype = place.dtype
        self.device = place.device
        self._ops = ops
        self._embedding = VocabTable(
            place, "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self._head = self._embedding
        if not config.tied_embeddings:
            self._head = VocabTable(place, "lm_head.weight", config.vocab_size, config.hidden_size)
        self._layers = [DecoderLayer(config, i, place) for i in range(config.num_layers)]
        self._norm = place.empty(config.hidden_size)
        self._cos_sin = rotary_table(
            config.rope, config.head_dim, config.max_position_embeddings, place.device
        )
        norms = [layer.input_norm for layer in self._layers]
        self._next_norms = [*norms[1:], self._norm]

    def parts(self) -> Iterator[WeightPart]:
        """Every tensor that a checkpoint must have for this rank."""
        yield from self._embedding.parts()
        for layer in self._layers:
            yield from layer.parts()
        yield WeightPart("model.norm.weight", self._norm, tuple(self._norm.shape))
        if self._head is not self._embedding:
            yield from self._head.parts()

    def weights_bytes(self) -> int:
        """Memory of this rank's parameters."""
        return sum(part.target.numel() * part.target.itemsize for part in self.parts())

    def hidden_states(
        self, token_ids: Tensor, batch: AttentionBatch, attention: AttentionBackend
    ) -> Tensor:
        """One forward pass over a planned batch.

        Args:
            token_ids: [T] int32 or int64.
            batch: geometry for which `attention.plan` has been called.

        Returns:
            [T, hidden], after the final norm.
        """
        rotation = self._ops.rotation(self._cos_sin, batch.positions, self.dtype)
        context = StepContext(self.group, self._ops, attention, rotation, batch.slots)
        residual = self._embedding.embed(token_ids, self.group)
        x = self._ops.rms_norm(residual, self._layers[0].input_norm, self.config.norm_eps)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            x = layer(x, residual, next_norm, context)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab_size] in the model's dtype, whole on every rank."""
        return self._head.logits(hidden, self.group)
