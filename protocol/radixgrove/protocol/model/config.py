"""A decoder's shape, read from a Hugging Face `config.json` as transformers reads it.

A key that is null counts as absent, and an absent one has the default of its architecture. What
changes the arithmetic in a way that is not known here is refused, since ignoring it would silently
give other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.model.quantization import (
    Quantization,
    QuantizationError,
    parse_quantization,
)


class ModelError(InvalidInput, ValueError):
    """A model directory that cannot be served; the message is for the person who named it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for scaled variants, their parameters, none of them null."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any]


class QkNorm(StrEnum):
    """What the RMSNorms of queries and keys, before they are rotated, are over."""

    NONE = "none"
    HEAD = "head"  # each head, all with one weight
    WIDTH = "width"  # all heads of a token together


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls a layer's experts."""

    block: str = "mlp"  # below `model.layers.N`
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder's code depends on; sizes are of the whole model, not of one rank."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int  # tokens that the model can attend to, YaRN's factor included
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: QkNorm
    experts: ExpertsConfig | None
    dtype: str  # the checkpoint's own, a name of `DTYPES`
    quantization: Quantization | None = None  # None: the checkpoint has none

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None: it has an MLP."""
        experts = self.experts
        if experts is None or layer in experts.dense_layers or (layer + 1) % experts.step:
            return None
        return experts

    @property
    def expert_layers(self) -> int:
        return sum(self.experts_of(layer) is not None for layer in range(self.num_layers))


class _Window(Enum):
    """Which layers attend within `sliding_window`."""

    NONE = auto()
    ALL = auto()
    ALL_IF_USED = auto()  # with `use_sliding_window`
    LATER_IF_USED = auto()  # those from `max_window_layers` on
    EARLIER_IF_USED = auto()  # every other one of those before


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertFamily:
    """Keys of a family's experts, and what is true where they are absent."""

    count: int
    per_token: int
    size_key: str = "intermediate_size"
    size: int | None = None
    renormalizes: bool | None = None  # None: `norm_topk_prob`
    shared: int = 0  # 0: there is no shared expert, else `shared_expert_intermediate_size`
    by_layer: bool = False  # `decoder_sparse_step` and `mlp_only_layers` count
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What an architecture name implies and its config does not say."""

    model_type: str
    longest: int  # `max_position_embeddings` by default
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: an equal part of the hidden size
    qkv_bias: bool | None = False  # None: the config's `attention_bias` decides, for all four
    qkv_bias_key: bool = False  # whether `qkv_bias` counts
    mlp_bias: bool = False  # whether `mlp_bias` counts
    qk_norm: QkNorm = QkNorm.NONE
    window: _Window = _Window.NONE
    default_window: int | None = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    experts: _ExpertFamily | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(model_type="llama", longest=2048, qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": _Family(
        model_type="mistral", longest=131072, kv_heads=8, window=_Window.ALL
    ),
    "MixtralForCausalLM": _Family(
        model_type="mixtral",
        longest=131072,
        kv_heads=8,
        window=_Window.ALL,
        default_window=None,
        norm_eps=1e-5,
        rope_theta=1e6,
        experts=_ExpertFamily(
            count=8,
            per_token=2,
            renormalizes=True,
            names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        ),
    ),
    "OlmoeForCausalLM": _Family(
        model_type="olmoe",
        longest=4096,
        qkv_bias=None,
        qk_norm=QkNorm.WIDTH,
        norm_eps=1e-5,
        experts=_ExpertFamily(count=64, per_token=8),
    ),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2",
        longest=32768,
        kv_heads=32,
        qkv_bias=True,
        window=_Window.LATER_IF_USED,
    ),
    "Qwen2MoeForCausalLM": _Family(
        model_type="qwen2_moe",
        longest=32768,
        kv_heads=16,
        qkv_bias=True,
        qkv_bias_key=True,
        window=_Window.EARLIER_IF_USED,
        experts=_ExpertFamily(
            count=60,
            per_token=4,
            size_key="moe_intermediate_size",
            size=1408,
            shared=5632,
            by_layer=True,
        ),
    ),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3",
        longest=32768,
        kv_heads=32,
        head_dim=128,
        qkv_bias=None,
        qk_norm=QkNorm.HEAD,
        window=_Window.LATER_IF_USED,
    ),
    "Qwen3MoeForCausalLM": _Family(
        model_type="qwen3_moe",
        longest=32768,
        kv_heads=4,
        qkv_bias=None,
        qk_norm=QkNorm.HEAD,
        window=_Window.ALL_IF_USED,
        experts=_ExpertFamily(
            count=128,
            per_token=8,
            size_key="moe_intermediate_size",
            size=768,
            by_layer=True,
        ),
    ),
}
MAX_EXPERTS = 512
MAX_LAYERS = 1024
MAX_LENGTH = 1 << 22  # tokens: there is a row of the rotary table for each
_DEFAULT_FULL_LAYERS = 28  # `max_window_layers`
DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_QUANTIZED_OTHERWISE = ("quantization", "compression_config")
# Keys of variants that share an architecture's name, or of other architectures. The model would be
# another one without them.
_CHANGES_ARITHMETIC = re.compile(
    r"rope_|rotary_|alibi|softcap|_multiplier|logits?_scal|scale_emb|scale_depth|dim_model_base"
    r"|query_pre_attn|qk_norm|qk_layernorm|clip_qkv|expert|^moe_|chunk_size|no_rope|temperature_tuning"
)
_READ_ROPE_KEYS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
)
_READ_EXPERT_KEYS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok"}
    | {"moe_intermediate_size", "shared_expert_intermediate_size"}
)
_ROPE_PARAMETERS = frozenset(
    {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor"}
)
_ROPE_ABSENT_AT_ZERO = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
_ROPE_REMARKS = frozenset({"finetuned"})  # what people note there, without effect
_SCALED_FROM_ORIGINAL = ("yarn", "llama3")
# Kinds of rope and what each needs. "dynamic" stretches beyond the model's length alone, which is
# never reached here.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a `config.json` describes.

    Both spellings of transformers are read: `rope_theta` + `rope_scaling` + `torch_dtype` (4.x) and
    `rope_parameters` + `dtype` (5.x).

    Raises:
        ModelError: unsupported architecture, activation or rope, or a missing or senseless size.
    """
    architecture, family = _family(raw)
    given = {key: value for key, value in raw.items() if value is not None}
    if (activation := given.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} is not supported, only silu")
    for key in _QUANTIZED_OTHERWISE:
        if key in given:
            raise ModelError(
                f"config.json: {key} is not supported, only quantization_config; use the "
                "unquantized weights"
            )
    _refuse_unknown_arithmetic(given, family)
    attention_bias = bool(given.get("attention_bias", False))
    hidden_size = _size(given, "hidden_size")
    num_heads = _size(given, "num_attention_heads")
    default_kv_heads = num_heads
    if "num_key_value_heads" not in raw:  # of all keys only this one differs from null
        default_kv_heads = family.kv_heads or num_heads
    num_kv_heads = _size(given, "num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = _size(given, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd: rotary embeddings need pairs")
    num_layers = _size(given, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers {num_layers} is more than {MAX_LAYERS}")
    longest = _size(given, "max_position_embeddings", family.longest)
    rope = _rope(given, longest, family.rope_theta)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.qkv_bias_key:
        qkv_bias = bool(given.get("qkv_bias", qkv_bias))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_size(given, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_size(given, "vocab_size"),
        norm_eps=_number(given, "rms_norm_eps", family.norm_eps),
        max_position_embeddings=_length(rope, longest, _window(raw, family, num_layers)),
        rope=rope,
        tied_embeddings=bool(given.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=family.mlp_bias and bool(given.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        experts=_experts(given, family.experts, num_layers),
        dtype=_dtype(given),
        quantization=_quantization(given),
    )


def _length(rope: RopeConfig, longest: int, window: int | None) -> int:
    """Tokens that the model attends to."""
    length = _scaled_length(rope, longest)
    length = length if window is None else min(length, window)
    if not 1 <= length <= MAX_LENGTH:
        raise ModelError(
            f"config.json: max_position_embeddings and rope_parameters make a length of {length} "
            f"tokens; possible are 1 to {MAX_LENGTH}"
        )
    return length


def _family(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    if not names:
        for name, family in _FAMILIES.items():
            if family.model_type == raw.get("model_type"):
                return name, family
    found = ", ".join(map(str, names)) or "none named"
    supported = ", ".join(sorted(_FAMILIES))
    raise ModelError(f"architecture not supported: {found}; supported are {supported}")


def _refuse_unknown_arithmetic(given: Mapping[str, Any], family: _Family) -> None:
    read = _READ_ROPE_KEYS | (_READ_EXPERT_KEYS if family.experts else frozenset())
    for key, value in given.items():
        if key in read or not _CHANGES_ARITHMETIC.search(key):
            continue
        if value and not (value == 1 and not isinstance(value, bool)):
            raise ModelError(f"config.json: {key} {value!r} is not supported")


def _size(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = given.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _window(raw: Mapping[str, Any], family: _Family, num_layers: int) -> int | None:
    """Attention here is over the whole context, so a sliding window bounds the length instead."""
    kind = family.window
    if kind is _Window.NONE or (kind is not _Window.ALL and not raw.get("use_sliding_window")):
        return None
    if kind in (_Window.LATER_IF_USED, _Window.EARLIER_IF_USED):
        kinds = raw.get("layer_types")
        border = raw.get("max_window_layers")
        border = _DEFAULT_FULL_LAYERS if border is None else border
        if kinds is not None:
            windowed = any(kind != "full_attention" for kind in kinds)
        else:
            windowed = border < num_layers if kind is _Window.LATER_IF_USED else border > 0
        if not windowed:
            return None
    window = raw.get("sliding_window", family.default_window)  # null: there is none
    return window if isinstance(window, int) and window > 0 else None


def _experts(
    given: Mapping[str, Any], family: _ExpertFamily | None, num_layers: int
) -> ExpertsConfig | None:
    if family is None:
        return None
    # transformers takes both names for the same.
    counts = {key: given[key] for key in ("num_experts", "num_local_experts") if key in given}
    if len(set(counts.values())) > 1:
        raise ModelError(f"config.json: num_experts and num_local_experts differ: {counts}")
    if family.by_layer and 0 in counts.values():
        return None
    key = next(iter(counts), "num_experts")
    count = _size(given, key, family.count)
    per_token = _size(given, "num_experts_per_tok", family.per_token)
    if count > MAX_EXPERTS:
        raise ModelError(f"config.json: {key} {count} is more than {MAX_EXPERTS}")
    if per_token > count:
        raise ModelError(f"config.json: num_experts_per_tok {per_token} of {count} experts")
    shared = family.shared
    if shared:
        shared = _size(given, "shared_expert_intermediate_size", shared)
    renormalize = family.renormalizes
    if renormalize is None:
        renormalize = bool(given.get("norm_topk_prob", False))
    dense = given.get("mlp_only_layers", []) if family.by_layer else []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=_size(given, family.size_key, family.size),
        renormalize=renormalize,
        shared_size=shared,
        step=_size(given, "decoder_sparse_step", 1) if family.by_layer else 1,
        dense_layers=frozenset(dense),
        names=family.names,
    )


def _dtype(given: Mapping[str, Any]) -> str:
    found = str(given.get("dtype") or given.get("torch_dtype") or "float32")
    name = found.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ModelError(f"dtype {found!r} is not supported, only {', '.join(DTYPES)}")
    return name


def _quantization(given: Mapping[str, Any]) -> Quantization | None:
    if "quantization_config" not in given:
        return None
    try:
        return parse_quantization(given["quantization_config"])
    except QuantizationError as error:
        raise ModelError(f"config.json: {error}") from error


def _rope(given: Mapping[str, Any], longest: int, default_theta: float) -> RopeConfig:
    found = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ModelError("config.json: rope_scaling is not an object")
    parameters = {key: value for key, value in found.items() if value is not None}
    theta = _number({**given, **parameters}, "rope_theta", default_theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_REMARKS):
        parameters.pop(key, None)
    if kind not in _ROPE_NEEDS:
        known = ", ".join(_ROPE_NEEDS)
        raise ModelError(f"rope type {kind!r} is not supported; supported are {known}")
    if unknown := sorted(map(str, parameters.keys() - _ROPE_PARAMETERS)):
        raise ModelError(f"rope parameters are not supported: {', '.join(unknown)}")
    if kind in _SCALED_FROM_ORIGINAL:
        original = given.get("original_max_position_embeddings")  # beside the rope's: it wins
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", longest)
    if kind == "yarn" and "factor" not in parameters:
        parameters["factor"] = longest / _number(parameters, "original_max_position_embeddings")
    for name in _ROPE_ABSENT_AT_ZERO:
        if not parameters.get(name, True):
            del parameters[name]
    for name in _ROPE_NEEDS[kind]:
        if name not in parameters:
            raise ModelError(f"rope type {kind!r} needs {name!r}")
    for name in parameters.keys() - {"truncate"}:
        _number(parameters, name)
    return RopeConfig(theta=theta, kind=kind, parameters=parameters)


def _scaled_length(rope: RopeConfig, longest: int) -> int:
    """YaRN's length is what it stretches to, whatever `max_position_embeddings` says."""
    if rope.kind != "yarn":
        return longest
    original = _number(rope.parameters, "original_max_position_embeddings")
    return int(_number(rope.parameters, "factor") * original)


def check_divides(config: ModelConfig, tp: int, ep: int = 1) -> None:
    """Refuse a `tp` or `ep` that cannot split the model.

    Raises:
        ModelError: names the values that do.
    """
    _check_experts_divide(config, tp, ep)
    sizes = [config.num_heads, config.num_kv_heads]
    named = [f"{sizes[0]} query heads", f"{sizes[1]} KV heads"]
    if config.expert_layers < config.num_layers:
        sizes.append(config.intermediate_size)
        named.append(f"MLP width {config.intermediate_size}")
    inner = 0
    if experts := config.experts:
        inner = experts.intermediate_size
        named.append(f"expert width {inner}" + (f" over ep {ep}" if ep > 1 else ""))
        if experts.shared_size:
            sizes.append(experts.shared_size)
            named.append(f"shared expert's width {experts.shared_size}")

    def divides(n: int) -> bool:
        return n % ep == 0 and inner % (n // ep) == 0 and all(size % n == 0 for size in sizes)

    possible = [n for n in range(1, config.num_kv_heads + 1) if divides(n)]
    if tp not in possible:
        raise ModelError(
            f"tp {tp} does not divide the model's {', '.join(named[:-1])} and {named[-1]}; "
            f"possible: {', '.join(map(str, possible)) or 'none'}"
        )
    _check_blocks(config, tp, ep, possible)


def _check_experts_divide(config: ModelConfig, tp: int, ep: int) -> None:
    count = config.experts.count if config.experts else 1
    possible = [n for n in range(1, tp + 1) if tp % n == 0 and count % n == 0]
    if ep in possible:
        return
    if config.experts is None:
        raise ModelError(f"ep {ep} is for models with experts, and this one has none; possible: 1")
    raise ModelError(
        f"ep {ep} does not divide the group's tp {tp} and the model's {count} experts; possible: "
        f"{', '.join(map(str, possible))}"
    )


def _check_blocks(config: ModelConfig, tp: int, ep: int, possible: Sequence[int]) -> None:
    """Refuse a `tp` whose ranks would hold a part of what shares a scale."""
    schemes = config.quantization.schemes() if config.quantization else ()
    for block in (scheme.block for scheme in schemes if scheme.block is not None):
        if not _keeps_blocks(config, tp, ep, block):
            largest = max((n for n in possible if _keeps_blocks(config, n, ep, block)), default=0)
            works = (
                f"the largest that works is {largest}" if largest else f"none works with ep {ep}"
            )
            raise ModelError(
                f"tp {tp} would cut blocks of {block[0]}x{block[1]} of the quantized weights, "
                f"which share a scale; {works}"
            )


def _keeps_blocks(config: ModelConfig, tp: int, ep: int, block: tuple[int, int]) -> bool:
    """Whether every rank's part of each projection begins and ends with a block."""
    rows, columns = block
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = [(config.intermediate_size, tp)] if config.expert_layers < config.num_layers else []
    inner += _expert_widths(config, tp, ep, block)

    def cut(sizes: Iterable[tuple[int, int]], length: int) -> bool:
        return any(ranks > 1 and size % (ranks * length) for size, ranks in sizes)

    by_rows, by_columns = [(queries, tp), (keys, tp), *inner], [(queries, tp), *inner]
    return not (cut(by_rows, rows) or cut(by_columns, columns))


def _expert_widths(
    config: ModelConfig, tp: int, ep: int, block: tuple[int, int]
) -> set[tuple[int, int]]:
    """Of experts with such blocks, and of shared ones: over how many ranks each is spread."""
    found = set()
    for layer in range(config.num_layers):
        if not (experts := config.experts_of(layer)) or config.quantization is None:
            continue
        prefix, down = f"model.layers.{layer}.{experts.names.block}", experts.names.down
        widths = {f"{prefix}.experts.0.{down}": (experts.intermediate_size, tp // ep)}
        if experts.shared_size:
            widths[f"{prefix}.shared_expert.down_proj"] = experts.shared_size, tp
        for name, width in widths.items():
            scheme = config.quantization.scheme_of(name)
            if scheme is not None and scheme.block == block:
                found.add(width)
    return found
