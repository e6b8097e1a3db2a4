"""A decoder's description, made of parts: what its layers are built from, whatever its family.

`families/` reads it off a `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.model.quantization import Quantization

DTYPES = ("float32", "bfloat16", "float16")
MAX_EXPERTS = 512
MAX_HEADS = 1024
MAX_LAYERS = 1024
MAX_LENGTH = 1 << 22  # tokens: there is a row of the rotary table for each


class ModelError(InvalidInput, ValueError):
    """A model directory that cannot be served; the message is for the person who named it."""


class NormKind(StrEnum):
    RMS = "rms"
    RMS_OF_ONE = "rms of one"  # an RMSNorm's weight is 1 more than the checkpoint's
    LAYER = "layer"  # with a bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Norms around attention and the MLP; each is called as in checkpoints, "": there is none.

    Those before are of the residual stream, those after of what is to join it.
    """

    kind: NormKind = NormKind.RMS
    eps: float
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for scaled variants, their parameters, none of them null."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any]
    share: float = 1.0  # of a head's dimensions, of which the first ones rotate
    interleaved: bool = False  # pairs are dimensions 2i and 2i + 1, else i and i + half of them

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head rotate."""
        return int(head_dim * self.share)


class QkNorm(StrEnum):
    """What the RMSNorms of queries and keys, before they are rotated, are over."""

    NONE = "none"
    HEAD = "head"  # each head, all with one weight
    WIDTH = "width"  # all heads of a token together


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention; sizes are of all ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    rope: RopeConfig
    unrotated: frozenset[int] = frozenset()  # layers without a rotary embedding
    window: int = 0  # tokens that windowed layers attend to, the query's own included
    windowed: frozenset[int] = frozenset()  # layers
    local: frozenset[int] = frozenset()  # layers that rotate by `local_rope`
    local_rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    fused: str = ""  # the tensor with q, k and v one below the other; "": each has its own
    sinks: bool = False  # each head has a logit more in its softmax, without a value

    @property
    def queries(self) -> int:
        """Values of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Values of all key heads of a token, or of all value heads."""
        return self.kv_heads * self.head_dim

    def window_of(self, layer: int) -> int:
        """0: there is none."""
        return self.window if layer in self.windowed else 0

    def rope_of(self, layer: int) -> RopeConfig | None:
        """None: the layer does not rotate."""
        if layer in self.unrotated:
            return None
        return (layer in self.local and self.local_rope) or self.rope


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`, and what
    checkpoints call the three."""

    width: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gate: str = "gate_proj"  # "": there is none
    up: str = "up_proj"  # the same as `gate`: one tensor has both, gate first
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls a layer's experts."""

    block: str = "mlp"  # below `model.layers.N`
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # All experts are in one tensor, [experts, inputs, outputs], in which an output of gate and one
    # of up take turns. Otherwise one by one, or in one tensor, [experts, outputs, inputs].
    alternate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGlu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gate up to `limit` and of up from its negative
    to it."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Experts in place of a layer's MLP, of which every token has a few by the softmax of its
    router logits, and how checkpoints name them."""

    count: int
    per_token: int
    intermediate_size: int  # of one
    renormalize: bool  # a token's weights, so that they sum to 1
    shared_size: int  # intermediate size of what all tokens go through besides, gated; 0: nothing
    step: int  # one layer in so many has experts, the first ones not
    dense_layers: frozenset[int]  # that have none in any case
    names: ExpertNames
    bias: bool = False  # of the three projections of each
    router_bias: bool = False
    clamped: ClampedSwiGlu | None = None  # between the projections; None: `silu(gate) * up`


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constant factors."""

    embedding: float = 1.0
    embedding_in_dtype: bool = False  # that is rounded to the model's dtype first
    residual: float = 1.0  # of all that joins the residual stream
    logits: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder's code depends on; sizes are of the whole model, not of one rank."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int  # tokens that the model can attend to, YaRN's factor included
    tied_embeddings: bool
    norms: Norms
    attention: Attention
    mlp: Mlp
    experts: ExpertsConfig | None
    multipliers: Multipliers
    dtype: str  # the checkpoint's own, a name of `DTYPES`
    quantization: Quantization | None  # None: the checkpoint has none

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None: it has an MLP."""
        experts = self.experts
        if experts is None or layer in experts.dense_layers or (layer + 1) % experts.step:
            return None
        return experts

    @property
    def expert_layers(self) -> int:
        return sum(self.experts_of(layer) is not None for layer in range(self.num_layers))
