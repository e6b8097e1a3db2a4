"""A `config.json`, of which a family's file reads the parts of its decoder.

A key that is null counts as absent, and an absent one has the default of its architecture. What
changes the arithmetic and is read by nothing is refused, since ignoring it would silently give
other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from radixgrove.protocol.model.config import (
    DTYPES,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LENGTH,
    Activation,
    Attention,
    ClampedSwiGlu,
    ExpertNames,
    ExpertsConfig,
    Mlp,
    ModelConfig,
    ModelError,
    Multipliers,
    Norms,
    QkNorm,
    RopeConfig,
)
from radixgrove.protocol.model.quantization import (
    MXFP4,
    Quantization,
    QuantizationError,
    parse_quantization,
)
from radixgrove.protocol.model.rope import positive, read_rope, scaled_length

_ACTIVATIONS = {activation.value: activation for activation in Activation}
_ACTIVATIONS["swish"] = Activation.SILU
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_QUANTIZED_OTHERWISE = ("quantization", "compression_config")
# Keys of variants that share an architecture's name, or of other architectures. The model would be
# another one without them.
_CHANGES_ARITHMETIC = re.compile(
    r"rope_|rotary_|alibi|softcap|_multiplier|logits?_scal|scale_emb|scale_depth|dim_model_base"
    r"|query_pre_attn|qk_norm|qk_layernorm|clip_qkv|expert|^moe_|chunk_size|no_rope|temperature_tuning"
)
_READ_OF_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_DEFAULT_FULL_LAYERS = 28  # `max_window_layers`


class Source:
    """What a `config.json` says; remembers which keys were read."""

    def __init__(self, raw: Mapping[str, Any], longest: int) -> None:
        """
        Args:
            longest: `max_position_embeddings` where the config has none.
        """
        self._raw = raw
        self._given = {key: value for key, value in raw.items() if value is not None}
        self._read = set(_READ_OF_ROPE)
        self.hidden_size = self.size("hidden_size")
        self.num_layers = self.size("num_hidden_layers")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(
                f"config.json: num_hidden_layers {self.num_layers} is more than {MAX_LAYERS}"
            )
        self.longest = self.size("max_position_embeddings", longest)

    # ---- values --------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        return key in self._given

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._given.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return positive(key, self.get(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if value not in (0, 1):  # false and true among them
            raise ModelError(f"config.json: {key} must be true or false, got {value!r}")
        return bool(value)

    # ---- parts ---------------------------------------------------------------------------------

    def attention(
        self,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        theta: float = 10000.0,
        rope: RopeConfig | None = None,
        unrotated: frozenset[int] = frozenset(),
        window: int | None = None,
        windowed: Iterable[int] | None = None,
        local_rope: RopeConfig | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: QkNorm = QkNorm.NONE,
        fused: str = "",
        sinks: bool = False,
    ) -> Attention:
        """
        Args:
            kv_heads: where the config does not say; None: as many as query heads.
            head_dim: likewise; None: an equal part of the hidden size.
            scale: None: the root of the head's size divides.
            theta: of the rotary embedding, likewise.
            rope: None: as the config says.
            window: None: there is none.
            windowed: layers that have it; None: all.
            local_rope: of those layers, also where the window is as long as a text; None: as of
                the others.
        """
        heads = self.size("num_attention_heads")
        if heads > MAX_HEADS:
            raise ModelError(f"config.json: num_attention_heads {heads} is more than {MAX_HEADS}")
        default = heads
        if "num_key_value_heads" not in self._raw:  # of all keys only this one differs from null
            default = kv_heads or heads
        kv_heads = self.size("num_key_value_heads", default)
        if heads % kv_heads:
            raise ModelError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        head_dim = self.size("head_dim", head_dim or self.hidden_size // heads)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd: rotary embeddings need pairs")
        rope = rope or self.rope(theta)
        if not rope.rotated(head_dim) or rope.rotated(head_dim) % 2:
            raise ModelError(
                f"config.json: partial_rotary_factor {rope.share:g} of head_dim {head_dim} is not "
                "an even number of dimensions"
            )
        if window is not None and window >= scaled_length(rope, self.longest):
            window = None  # all of a text is within it
        local = frozenset(range(self.num_layers) if windowed is None else windowed)
        within = local if window else frozenset()
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            rope=rope,
            unrotated=unrotated,
            window=window if window and within else 0,
            windowed=within,
            local=local if local_rope else frozenset(),
            local_rope=local_rope,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            fused=fused,
            sinks=sinks,
        )

    def rope(
        self,
        theta: float,
        *,
        share: float | None = None,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
    ) -> RopeConfig:
        """See `read_rope`; `scaling`: where the config has no parameters."""
        given = self._given
        if scaling is not None and not (given.keys() & {"rope_scaling", "rope_parameters"}):
            given = {**given, "rope_parameters": scaling}
        return read_rope(given, self.longest, theta, share=share, interleaved=interleaved)

    def mlp(
        self,
        *,
        activation: Activation = Activation.SILU,
        bias: bool = False,
        gate: str = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
    ) -> Mlp:
        """
        Args:
            activation: where the config does not say.
            gate, up, down: see `Mlp`.
        """
        return Mlp(
            width=self.size("intermediate_size"),
            activation=self.activation(activation),
            bias=bias,
            gate=gate,
            up=up,
            down=down,
        )

    def activation(self, default: Activation = Activation.SILU) -> Activation:
        name = self.get("hidden_activation") or self.get("hidden_act", default)
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            known = ", ".join(Activation)
            raise ModelError(f"activation {name!r} is not supported, only {known}")
        return _ACTIVATIONS[name]

    def experts(
        self,
        *,
        count: int,
        per_token: int,
        size_key: str = "intermediate_size",
        size: int | None = None,
        renormalizes: bool | None = None,
        shared: int = 0,
        by_layer: bool = False,
        names: ExpertNames | None = None,
        bias: bool = False,
        router_bias: bool = False,
        clamped: ClampedSwiGlu | None = None,
    ) -> ExpertsConfig | None:
        """
        Args:
            count, per_token, size: where the config does not say.
            renormalizes: None: `norm_topk_prob` decides.
            shared: `shared_expert_intermediate_size` where the config does not say; 0: there is
                no shared expert.
            by_layer: `decoder_sparse_step` and `mlp_only_layers` count.
        """
        if (activation := self.activation()) is not Activation.SILU:
            raise ModelError(f"activation {activation.value!r} is not supported for experts")
        # transformers takes both names for the same.
        found = {key: self.get(key) for key in ("num_experts", "num_local_experts")}
        counts = {key: value for key, value in found.items() if value is not None}
        if any(value != other for value, other in pairwise(counts.values())):
            raise ModelError(f"config.json: num_experts and num_local_experts differ: {counts}")
        key = next(iter(counts), "num_experts")
        width = self.size(size_key, size)
        per_token = self.size("num_experts_per_tok", per_token)
        if shared:
            shared = self.size("shared_expert_intermediate_size", shared)
        if by_layer and 0 in counts.values():
            return None
        count = self.size(key, count)
        if count > MAX_EXPERTS:
            raise ModelError(f"config.json: {key} {count} is more than {MAX_EXPERTS}")
        if per_token > count:
            raise ModelError(f"config.json: num_experts_per_tok {per_token} of {count} experts")
        if renormalizes is None:
            renormalizes = self.flag("norm_topk_prob")
        dense = self.get("mlp_only_layers", []) if by_layer else []
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise ModelError(
                f"config.json: mlp_only_layers must be a list of layers, got {dense!r}"
            )
        return ExpertsConfig(
            count=count,
            per_token=per_token,
            intermediate_size=width,
            renormalize=renormalizes,
            shared_size=shared,
            step=self.size("decoder_sparse_step", 1) if by_layer else 1,
            dense_layers=frozenset(dense),
            names=names or ExpertNames(),
            bias=bias,
            router_bias=router_bias,
            clamped=clamped,
        )

    # ---- windows -------------------------------------------------------------------------------

    def window(self, default: int | None) -> int | None:
        """Tokens that are attended to; `default` where the config does not say; null, 0, -1 and
        false are all of them."""
        found = self._raw.get("sliding_window", default)
        return None if found in (None, 0, -1) else self.size("sliding_window", default)

    def window_if_used(self, default: int | None) -> int | None:
        return self.window(default) if self.flag("use_sliding_window") else None

    def full_layers(self) -> int:
        """`max_window_layers`; below 0 as 0."""
        key = "max_window_layers"
        found = self.get(key)
        return 0 if type(found) is int and found <= 0 else self.size(key, _DEFAULT_FULL_LAYERS)

    def windowed_layers(self, otherwise: Iterable[int]) -> frozenset[int]:
        """Layers that have a window by `layer_types`; without those `otherwise`."""
        kinds = self.get("layer_types")
        if kinds is None:
            return frozenset(otherwise)
        known = "full_attention", "sliding_attention"
        of_all = isinstance(kinds, list) and len(kinds) >= self.num_layers
        if not of_all or any(kind not in known for kind in kinds):
            raise ModelError(
                f"config.json: layer_types must be {' or '.join(known)} for each of "
                f"{self.num_layers} layers, got {kinds!r}"
            )
        layers = range(self.num_layers)
        return frozenset(layer for layer in layers if kinds[layer] == known[1])

    # ---- the whole -----------------------------------------------------------------------------

    def decoder(
        self,
        *,
        attention: Attention,
        mlp: Mlp,
        norms: Norms,
        experts: ExpertsConfig | None = None,
        multipliers: Multipliers | None = None,
        tied: bool = False,
        dtype: str = "float32",
    ) -> ModelConfig:
        """
        Args:
            tied: where the config does not say whether embedding and head are one table.
            dtype: where it names none.

        Raises:
            ModelError: a key that would make another model of it was not read.
        """
        for key in _QUANTIZED_OTHERWISE:
            if self.has(key):
                raise ModelError(
                    f"config.json: {key} is not supported, only quantization_config; use the "
                    "unquantized weights"
                )
        self._refuse_unread()
        return ModelConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.size("vocab_size"),
            max_position_embeddings=self._length(attention),
            tied_embeddings=self.flag("tie_word_embeddings", tied),
            norms=norms,
            attention=attention,
            mlp=mlp,
            experts=experts,
            multipliers=multipliers or Multipliers(),
            dtype=self._dtype(dtype),
            quantization=self._quantization(experts),
        )

    def _length(self, attention: Attention) -> int:
        """Tokens that the model attends to."""
        length = scaled_length(attention.rope, self.longest)
        if not 1 <= length <= MAX_LENGTH:
            raise ModelError(
                "config.json: max_position_embeddings and rope_parameters make a length of "
                f"{length} tokens; possible are 1 to {MAX_LENGTH}"
            )
        return length

    def _refuse_unread(self) -> None:
        for key, value in self._given.items():
            if key in self._read or not _CHANGES_ARITHMETIC.search(key):
                continue
            if value and not (value == 1 and not isinstance(value, bool)):
                raise ModelError(f"config.json: {key} {value!r} is not supported")

    def _dtype(self, default: str) -> str:
        found = str(self.get("dtype") or self.get("torch_dtype") or default)
        name = found.removeprefix("torch.")
        name = _DTYPE_ALIASES.get(name, name)
        if name not in DTYPES:
            raise ModelError(f"dtype {found!r} is not supported, only {', '.join(DTYPES)}")
        return name

    def _quantization(self, experts: ExpertsConfig | None) -> Quantization | None:
        if not self.has("quantization_config"):
            return None
        try:
            found = parse_quantization(self.get("quantization_config"))
        except QuantizationError as error:
            raise ModelError(f"config.json: {error}") from error
        alternate = experts is not None and experts.names.alternate
        if alternate != (found.method == MXFP4):
            served = f"only {MXFP4} or none" if alternate else "only for experts of gpt-oss"
            raise ModelError(
                f"config.json: quantization_config: quant_method {found.method!r} is not supported "
                f"for this architecture, {served}"
            )
        return found
