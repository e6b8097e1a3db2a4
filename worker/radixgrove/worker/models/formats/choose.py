"""Which format each projection of a checkpoint has."""

from __future__ import annotations

from radixgrove.protocol.model.quantization import Numbers, Quantization
from radixgrove.worker.models.formats.base import ALL_UNQUANTIZED, UNQUANTIZED, Format, Formats
from radixgrove.worker.models.formats.mxfp4 import Mxfp4
from radixgrove.worker.models.formats.scaled import OnlineFloat8, Scaled


def choose_formats(quantization: Quantization | None) -> Formats:
    return ALL_UNQUANTIZED if quantization is None else QuantizedFormats(quantization)


class QuantizedFormats(Formats):
    """As a `quantization_config` says."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def of(self, prefix: str) -> Format:
        quantization = self._quantization
        scheme = quantization.scheme_of(prefix)
        if scheme is None:
            return UNQUANTIZED
        if scheme.numbers is Numbers.FLOAT4:
            return Mxfp4()
        if quantization.while_loading:
            return OnlineFloat8(quantization.method, scheme)
        inverse = quantization.method == "fp8"
        return Scaled(
            quantization.method, scheme, "weight_scale_inv" if inverse else "weight_scale"
        )
