"""How a checkpoint's projections are quantized: `quantization_config` of its `config.json`.

Read are `fp8` (transformers), `compressed-tensors` and `fbgemm_fp8`, as far as they are float8
(e4m3), `compressed-tensors` in int8, and `mxfp4`. What cannot be served is refused, and what would
be is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.settings import Quantize

MXFP4 = "mxfp4"  # a `quant_method`
MXFP4_BLOCK = 32  # columns that share a scale
_FIELD = "quantization_config"
_E4M3 = ("e4m3", "float8_e4m3fn")
_MAX_BLOCK = 1 << 16
_DIGITS = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[\w.-]+")  # of a module
_LEAST_COLUMNS = 16  # of a block: a step of a product on tensor cores
_ACTIVATION_BOUND = 1200.0  # `activation_scale_ub` of fbgemm_fp8 where it is absent
_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "dense")


class QuantizationError(InvalidInput, ValueError):
    """A `quantization_config` that cannot be served; the message names the field."""


class Numbers(StrEnum):
    """What weights, and quantized inputs, are stored as."""

    FLOAT8 = "float8"  # e4m3
    INT8 = "int8"  # symmetric
    FLOAT4 = "mxfp4"  # e2m1; weights alone, which are widened while they are read


_NUMBERS = {"float": Numbers.FLOAT8, "int": Numbers.INT8}


class Scales(StrEnum):
    """What one scale of a weight is for."""

    TENSOR = "tensor"
    CHANNEL = "channel"  # a row of the weight: an output
    BLOCK = "block"


class Activations(StrEnum):
    """How the inputs of a product are quantized."""

    KEPT = "kept"  # not at all
    STATIC = "static"  # by a scale of the checkpoint
    TOKEN = "token"  # by each row's largest value
    GROUP = "group"  # by the largest value of each part of a row, as wide as the weight's blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a projection is quantized."""

    scales: Scales
    activations: Activations
    numbers: Numbers = Numbers.FLOAT8
    block: tuple[int, int] | None = None  # rows and columns of the weight that share a scale
    activation_bound: float | None = None  # a row's largest value counts as this at most

    def __str__(self) -> str:
        size = "x".join(map(str, self.block)) + " " if self.block else ""
        return f"{self.numbers}, a scale per {size}{self.scales}, activations {self.activations}"


@dataclass(frozen=True, slots=True)
class Target:
    """Which projections a line of the config means.

    `Linear`: all; `re:PATTERN`: those with names that it matches from their beginning; else
    that one.
    """

    text: str

    @property
    def is_class(self) -> bool:
        return self.text == "Linear"

    @property
    def is_name(self) -> bool:
        """Whether it means one projection."""
        return not (self.is_class or self.text.startswith("re:"))

    def matches(self, name: str) -> bool:
        if self.text.startswith("re:"):
            return re.match(self.text[3:], name) is not None
        return self.is_class or self.text == name


class _Lookup:
    """Lists of targets. A mixture may name each of tens of thousands of projections in one."""

    def __init__(self, lists: Iterable[tuple[Target, ...]]) -> None:
        self._names: dict[str, int] = {}
        self._others: list[tuple[bool, int, Target]] = []
        for index, targets in enumerate(lists):
            for target in targets:
                if target.is_name:
                    self._names.setdefault(target.text, index)
                else:
                    self._others.append((target.is_class, index, target))

    def find(self, name: str) -> int | None:
        """The first list that means a projection; one for a class of layers counts last."""
        found = [(is_class, at) for is_class, at, other in self._others if other.matches(name)]
        if name in self._names:
            found.append((False, self._names[name]))
        return min(found)[1] if found else None


@dataclass(frozen=True, slots=True)
class Skipped:
    """The modules of a list of transformers': by name, by what that ends with, or by a pattern of
    the names of modules that it is part of.

    A mixture has tens of thousands of projections, and its list an entry or more for each layer:
    names are looked up, in which a dot stands for itself.
    """

    ends: tuple[str, ...]
    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Skipped:
        """
        Args:
            texts: patterns that can be compiled.
        """
        ends = tuple(texts)
        names = frozenset(filter(_NAME.fullmatch, ends))
        patterns = (rf"(?:{text})(?:(?<=\.)|(?=\.|$))" for text in ends if text not in names)
        return cls(ends, names, tuple(map(re.compile, patterns)))

    def matches(self, name: str) -> bool:
        return (
            name.endswith(self.ends)
            or not self.names.isdisjoint(_modules_of(name))
            or any(pattern.match(name) for pattern in self.patterns)
        )


def _modules_of(name: str) -> Iterator[str]:
    """The module itself and those that it is part of, with and without a dot behind."""
    yield name
    for dot in re.finditer(r"\.", name):
        yield name[: dot.start()]
        yield name[: dot.end()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Of a checkpoint: which of its projections are quantized, and how."""

    method: str
    groups: tuple[tuple[Scheme, tuple[Target, ...]], ...]
    ignore: tuple[Target, ...] = ()
    skipped: Skipped | None = None
    warns: bool = False  # of an `ignore` that matches nothing
    while_loading: bool = False  # the checkpoint is not quantized
    kv_scales: bool = False  # it has scales of KV in float8, one a layer for keys and for values
    _ignoring: _Lookup = field(init=False, repr=False, compare=False)
    _grouping: _Lookup = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ignoring", _Lookup([self.ignore]))
        object.__setattr__(self, "_grouping", _Lookup(targets for _, targets in self.groups))

    def scheme_of(self, name: str) -> Scheme | None:
        """How the projection `name` is quantized; None: it is not."""
        if self._ignoring.find(name) is not None:
            return None
        if self.skipped is not None and self.skipped.matches(name):
            return None
        found = self._grouping.find(name)
        return None if found is None else self.groups[found][0]

    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(scheme for scheme, _ in self.groups)

    def unused_ignores(self, names: Iterable[str]) -> list[str]:
        """Entries of `ignore` that match none of a model's projections."""
        return _unused(self.ignore, names)

    def unused_targets(self, names: Iterable[str]) -> list[str]:
        """Targets that match none of a model's projections."""
        return _unused([target for _, targets in self.groups for target in targets], names)


def _unused(targets: Iterable[Target], names: Iterable[str]) -> list[str]:
    known = frozenset(names)
    return [
        target.text
        for target in targets
        if target.text not in known and not any(map(target.matches, known))
    ]


ALL = (Target("Linear"),)
ONLINE_FP8 = Quantization(
    method="fp8, quantized while loading",
    groups=((Scheme(scales=Scales.CHANNEL, activations=Activations.TOKEN), ALL),),
    ignore=(Target("lm_head"),),
    while_loading=True,
)


def intended_quantization(own: Quantization | None, quantize: Quantize) -> Quantization | None:
    """How projections are quantized when a checkpoint is served with the setting `quantize`.

    Raises:
        QuantizationError: the checkpoint is quantized already.
    """
    if quantize is Quantize.NONE:
        return own
    if own is not None:
        raise QuantizationError(
            f"quantize {quantize.value} is for checkpoints that are not quantized, and this one is "
            f"({own.method}); set quantize to none"
        )
    return ONLINE_FP8


def parse_quantization(raw: object) -> Quantization:
    """
    Raises:
        QuantizationError: the field's name, what it says, and what would be served.
    """
    if not isinstance(raw, Mapping):
        raise QuantizationError(f"{_FIELD} is not an object")
    given = {str(key): value for key, value in raw.items() if value is not None}
    method = given.get("quant_method")
    parse = _METHODS.get(str(method))
    if parse is None:
        known = ", ".join(sorted(_METHODS))
        raise QuantizationError(f"{_FIELD}: quant_method {method!r} is not supported, only {known}")
    return parse(given)


def _fp8(given: Mapping[str, Any]) -> Quantization:
    _choose(given, "fmt", _E4M3, _E4M3[0])
    _choose(given, "scale_fmt", ("float", "ue8m0"), "float")
    _choose(given, "expert_dtype", ("fp8",), "fp8")
    if given.get("modules_to_convert"):
        _refuse("modules_to_convert", given["modules_to_convert"], "projections alone")
    activations = _choose(given, "activation_scheme", ("dynamic", "static"), "dynamic")
    size = given.get("weight_block_size")
    static = activations == "static"
    if size is None:
        kind = Activations.STATIC if static else Activations.TOKEN
        scheme = Scheme(scales=Scales.TENSOR, activations=kind)
    elif static:
        _refuse("activation_scheme", activations, "dynamic, with a weight_block_size")
    else:
        block = _block("weight_block_size", size)
        scheme = Scheme(scales=Scales.BLOCK, activations=Activations.GROUP, block=block)
    return _of_transformers("fp8", given, scheme)


def _fbgemm(given: Mapping[str, Any]) -> Quantization:
    bound = given.get("activation_scale_ub", _ACTIVATION_BOUND)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < 1e30:
        _refuse("activation_scale_ub", bound, "a positive number")
    scheme = Scheme(
        scales=Scales.CHANNEL, activations=Activations.TOKEN, activation_bound=float(bound)
    )
    return _of_transformers("fbgemm_fp8", given, scheme)


def _of_transformers(method: str, given: Mapping[str, Any], scheme: Scheme) -> Quantization:
    """The head is never quantized there. Its lists name norms and the like too."""
    key = "modules_to_not_convert" if "modules_to_not_convert" in given else "ignored_layers"
    names = [*_texts(key, given.get(key, [])), "lm_head"]
    skipped = Skipped.of(_pattern(key, name) for name in names)
    return Quantization(method=method, groups=((scheme, ALL),), skipped=skipped)


def _mxfp4(given: Mapping[str, Any]) -> Quantization:
    """Of experts alone, whatever else the list of what is not converted leaves out."""
    scheme = Scheme(
        scales=Scales.BLOCK,
        activations=Activations.KEPT,
        numbers=Numbers.FLOAT4,
        block=(1, MXFP4_BLOCK),
    )
    key = "modules_to_not_convert"
    skipped = Skipped.of(_pattern(key, name) for name in _texts(key, given.get(key, [])))
    experts = (Target(r"re:.*\.experts\."),)
    return Quantization(method=MXFP4, groups=((scheme, experts),), skipped=skipped)


def _compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    _choose(given, "format", _COMPRESSED_FORMATS, _COMPRESSED_FORMATS[0])
    _choose(given, "quantization_status", ("compressed", "frozen"), "compressed")
    sparsity = _object("sparsity_config", given.get("sparsity_config"))
    _choose(sparsity, "format", ("dense",), "dense", "sparsity_config")
    if given.get("transform_config"):
        _refuse("transform_config", given["transform_config"], "none")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse("config_groups", groups, "an object with at least one group")
    ignore = tuple(
        Target(_pattern("ignore", text)) for text in _texts("ignore", given.get("ignore", []))
    )
    return Quantization(
        method="compressed-tensors",
        groups=tuple(_group(f"config_groups.{name}", group) for name, group in groups.items()),
        ignore=ignore,
        warns=True,
        kv_scales=_has_kv_scales(_object("kv_cache_scheme", given.get("kv_cache_scheme"))),
    )


def _has_kv_scales(given: Mapping[str, Any]) -> bool:
    """Whether `kv_cache_scheme` gives one float8 scale a layer. Other schemes are ignored: the
    setting `kv_dtype` decides how KV is stored."""
    return (given.get("num_bits"), given.get("type"), given.get("strategy", "tensor")) == (
        8,
        "float",
        "tensor",
    ) and not _flag(given, "dynamic", "kv_cache_scheme")


def _group(where: str, raw: object) -> tuple[Scheme, tuple[Target, ...]]:
    if not isinstance(raw, Mapping):
        _refuse(where, raw, "an object")
    texts = _texts(f"{where}.targets", raw.get("targets") or [])
    if not texts:
        _refuse(f"{where}.targets", texts, "names, patterns or Linear")
    if raw.get("output_activations"):
        _refuse(f"{where}.output_activations", raw["output_activations"], "none")
    field = f"{where}.weights"
    numbers, weights = _numbers(field, raw.get("weights"))
    if _flag(weights, "dynamic", field):
        _refuse(f"{field}.dynamic", True, "false")
    kinds: tuple[str, ...] = ("tensor", "channel", "block", "group")
    strategy = _choose(
        weights, "strategy", kinds if numbers is Numbers.FLOAT8 else kinds[:2], "tensor", field
    )
    block = None
    if strategy == "block":
        block = _block(f"{field}.block_structure", weights.get("block_structure"))
    elif strategy == "group":
        if weights.get("actorder"):  # else groups may be of columns in an order of their own
            _choose(weights, "actorder", ("weight", "static"), "static", field)
        block = 1, _columns(f"{field}.group_size", weights.get("group_size"))
    scheme = Scheme(
        scales=Scales.BLOCK if block else Scales(strategy),
        activations=_inputs(
            f"{where}.input_activations", raw.get("input_activations"), numbers, block
        ),
        numbers=numbers,
        block=block,
    )
    return scheme, tuple(Target(_pattern(f"{where}.targets", text)) for text in texts)


def _inputs(
    field: str, raw: object, numbers: Numbers, block: tuple[int, int] | None
) -> Activations:
    """A dynamic scale of a whole batch would let its rows change each other's answers: it is taken
    per token, which is no coarser."""
    if raw is None:
        return Activations.KEPT
    own, given = _numbers(field, raw)
    if own is not numbers:
        _refuse(f"{field}.type", own.value, f"the weights' {numbers.value}")
    kinds: tuple[str, ...] = ("tensor", "token", "group")
    strategy = _choose(
        given, "strategy", kinds if numbers is Numbers.FLOAT8 else kinds[:2], "tensor", field
    )
    if strategy == "group":
        width = _width(f"{field}.group_size", given.get("group_size"))
        if block is None or block[1] != width:
            _refuse(f"{field}.group_size", width, "the width of the weight's blocks")
        return Activations.GROUP
    if _flag(given, "dynamic", field):
        return Activations.TOKEN
    if strategy == "token" or block is not None:
        _refuse(f"{field}.dynamic", given.get("dynamic"), "true, for scales per token or group")
    return Activations.STATIC


def _numbers(field: str, raw: object) -> tuple[Numbers, Mapping[str, Any]]:
    """What a description quantizes to, and the rest of what it says."""
    if raw is None:
        _refuse(field, raw, "an object")
    given = _object(field, raw)
    bits, kind = given.get("num_bits"), given.get("type")
    if bits != 8 or not isinstance(kind, str) or kind not in _NUMBERS:
        _refuse(f"{field}.num_bits and type", f"{bits} {kind}", "8 float or 8 int")
    if not _flag(given, "symmetric", field, default=True) and kind == "int":
        _refuse(f"{field}.symmetric", False, "true, of int8")
    return _NUMBERS[kind], given


def _choose(
    given: Mapping[str, Any], key: str, known: tuple[str, ...], default: str, where: str = ""
) -> str:
    value = given.get(key, default)
    if value not in known:
        _refuse(f"{where}.{key}" if where else key, value, " or ".join(known))
    return str(value)


def _flag(given: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    value = given.get(key, default)
    if value is not None and not isinstance(value, bool):
        _refuse(f"{where}.{key}", value, "true or false")
    return bool(value)


def _object(field: str, raw: object) -> dict[str, Any]:
    """What an object says, without its nulls; null: nothing."""
    if not isinstance(raw, Mapping | None):
        _refuse(field, raw, "an object")
    return {str(key): value for key, value in (raw or {}).items() if value is not None}


def _block(field: str, raw: object) -> tuple[int, int]:
    """Rows and columns of a block, from two numbers or a text such as `128x128`."""
    sizes = (
        [int(part) if _DIGITS.fullmatch(part) else part for part in raw.split("x")]
        if isinstance(raw, str)
        else raw
    )
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        _refuse(field, raw, "two numbers")
    return _width(field, sizes[0]), _columns(field, sizes[1])


def _columns(field: str, value: object) -> int:
    """Columns of a block; a power of two, since inputs are quantized in the same blocks."""
    width = _width(field, value)
    if width < _LEAST_COLUMNS or width & (width - 1):
        _refuse(field, value, f"a power of two from {_LEAST_COLUMNS} on, for columns")
    return width


def _width(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_BLOCK:
        _refuse(field, value, f"a number from 1 to {_MAX_BLOCK}")
    return value


def _texts(field: str, raw: object) -> list[str]:
    if not isinstance(raw, list) or not all(isinstance(text, str) for text in raw):
        _refuse(field, raw, "a list of names")
    return raw


def _pattern(field: str, text: str) -> str:
    """The text, once its pattern is known to be one."""
    try:
        re.compile(text.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        _refuse(field, text, f"patterns that can be compiled ({error})")
    return text


def _refuse(field: str, value: object, supported: str) -> NoReturn:
    raise QuantizationError(f"{_FIELD}: {field} {value!r} is not supported, only {supported}")


_METHODS = {
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    MXFP4: _mxfp4,
}
