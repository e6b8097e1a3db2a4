"""Which format each projection of a checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.quantization import Numbers, Quantization, Scheme
from radixgrove.worker.models.formats.base import ALL_UNQUANTIZED, UNQUANTIZED, Format, Formats
from radixgrove.worker.models.formats.mxfp4 import Mxfp4
from radixgrove.worker.models.formats.scaled import OnlineFloat8, Scaled

log = logging.getLogger(__name__)


def choose_formats(quantization: Quantization | None) -> Formats:
    return ALL_UNQUANTIZED if quantization is None else QuantizedFormats(quantization)


class QuantizedFormats(Formats):
    """As a `quantization_config` says; remembers which projections it was asked about."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._asked: set[str] = set()

    def of(self, prefixes: Iterable[str]) -> Format:
        schemes = {name: self._quantization.scheme_of(name) for name in prefixes}
        self._asked.update(schemes)
        first, *others = schemes
        for other in others:
            if schemes[other] != schemes[first]:
                raise ModelError(
                    f"{first} is {_described(schemes[first])} and {other} is "
                    f"{_described(schemes[other])}: they are computed as one, and have to be "
                    "quantized alike"
                )
        return self._format(schemes[first])

    def _format(self, scheme: Scheme | None) -> Format:
        if scheme is None:
            return UNQUANTIZED
        if scheme.numbers is Numbers.FLOAT4:
            return Mxfp4()
        quantization = self._quantization
        if quantization.while_loading:
            return OnlineFloat8(quantization.method, scheme)
        inverse = quantization.method == "fp8"
        return Scaled(
            quantization.method, scheme, "weight_scale_inv" if inverse else "weight_scale"
        )

    def check(self) -> None:
        quantization = self._quantization
        if unused := quantization.unused_targets(self._asked):
            raise ModelError(
                f"quantization_config: targets {', '.join(unused)} match no projection of the "
                f"model, such as {min(self._asked)}"
            )
        unused = quantization.unused_ignores(self._asked) if quantization.warns else []
        if unused:
            log.warning(
                "quantization_config: ignore %s matches no projection of the model",
                ", ".join(unused),
            )


def _described(scheme: Scheme | None) -> str:
    return "not quantized" if scheme is None else f"quantized ({scheme})"
