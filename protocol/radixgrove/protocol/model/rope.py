"""Rotary embeddings, as a `config.json` describes them in either spelling of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixgrove.protocol.model.config import ModelError, RopeConfig

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


def read_rope(
    given: Mapping[str, Any],
    longest: int,
    theta: float,
    *,
    share: float | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """
    Args:
        given: a `config.json` without its nulls.
        longest: `max_position_embeddings`.
        theta: where the config has none.
        share: `partial_rotary_factor` likewise; None: heads of the family rotate whole.
        interleaved: see `RopeConfig`.

    Raises:
        ModelError: a kind that is not served, or its parameters are not what they must be.
    """
    found = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ModelError("config.json: rope_scaling is not an object")
    parameters = {key: value for key, value in found.items() if value is not None}
    theta = positive("rope_theta", {**given, **parameters}.get("rope_theta", theta))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = {"partial_rotary_factor": share or 1.0, **given, **parameters}
    rotated = positive("partial_rotary_factor", partial["partial_rotary_factor"])
    if rotated > 1.0 or (share is None and rotated != 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {rotated:g} is not supported here")
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_REMARKS):
        parameters.pop(key, None)
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
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
        if parameters.get(name) == 0:
            del parameters[name]
    for name in _ROPE_NEEDS[kind]:
        if name not in parameters:
            raise ModelError(f"rope type {kind!r} needs {name!r}")
    for name in parameters.keys() - {"truncate"}:
        _number(parameters, name)
    _check_together(kind, theta, parameters)
    return RopeConfig(
        theta=theta, kind=kind, parameters=parameters, share=rotated, interleaved=interleaved
    )


def _check_together(kind: str, theta: float, parameters: Mapping[str, Any]) -> None:
    """What numbers that are each possible have to be beside each other, lest one is divided by 0.

    Raises:
        ModelError: they are not.
    """
    if not isinstance(truncate := parameters.get("truncate", True), bool):
        raise ModelError(f"config.json: truncate must be true or false, got {truncate!r}")
    if kind == "yarn" and theta <= 1:
        raise ModelError(f"config.json: rope_theta must be above 1 with yarn, got {theta:g}")
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        if high <= low:
            raise ModelError(
                f"config.json: high_freq_factor {high:g} must be above low_freq_factor {low:g}"
            )


def scaled_length(rope: RopeConfig, longest: int) -> int:
    """YaRN's length is what it stretches to, whatever `max_position_embeddings` says."""
    if rope.kind != "yarn":
        return longest
    original = _number(rope.parameters, "original_max_position_embeddings")
    return int(_number(rope.parameters, "factor") * original)


def positive(key: str, value: object) -> float:
    """The value of a key, once it is known to be a positive number.

    Raises:
        ModelError: it is none.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _number(parameters: Mapping[str, Any], key: str) -> float:
    return positive(key, parameters.get(key))
