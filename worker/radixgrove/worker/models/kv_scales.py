"""Scales of a checkpoint for keys and values in float8, which change weights and no kernel.

Pages hold keys and values divided by their layer's scales. What a layer's projections come to is
divided while its weights are loaded, and queries and the output projection are multiplied in turn:
attention's result is the same. A scale counts as the next power of two, with which both are exact,
and no value that the scale was made for is beyond float8's range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from radixgrove.worker.models.formats.scaled import store_scales
from radixgrove.worker.models.parts import FLOATS, WeightPart

_NAMES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.k_scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "attn.v_scale", "kv_scale"),
}


class KvScales:
    """Of one layer; 1 where the checkpoint has none."""

    def __init__(self, prefix: str, *, required: bool) -> None:
        """
        Args:
            prefix: of the names of attention's tensors.
            required: the checkpoint's config says that it has them.
        """
        self._prefix = prefix
        self._required = required
        self._values = {kind: torch.ones((), dtype=torch.float32) for kind in _NAMES}

    def parts(self) -> Iterator[WeightPart]:
        for kind, value in self._values.items():
            name, *others = (f"{self._prefix}.{name}" for name in _NAMES[kind])
            yield WeightPart(
                name,
                value,
                (),
                store=partial(store_scales, value, 1),
                types=FLOATS,
                format="kv_cache_scheme",
                aliases=tuple(others),
                optional=not self._required,
                loose=True,
                dummy=1.0,
            )

    @property
    def keys(self) -> float:
        """By which keys are divided."""
        return _power_of_two(float(self._values["k"]))

    @property
    def values(self) -> float:
        """By which values are divided."""
        return _power_of_two(float(self._values["v"]))


def _power_of_two(scale: float) -> float:
    """The next one from `scale` on."""
    return 2.0 ** math.ceil(math.log2(scale))
