"""A `config.json`, read as transformers reads it, into the description of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.families.gemma3 import GEMMA3
from radixgrove.protocol.model.families.glm import GLM, GLM4
from radixgrove.protocol.model.families.gpt_oss import GPT_OSS
from radixgrove.protocol.model.families.granite import GRANITE
from radixgrove.protocol.model.families.llama import LLAMA
from radixgrove.protocol.model.families.mistral import MISTRAL
from radixgrove.protocol.model.families.mixtral import MIXTRAL
from radixgrove.protocol.model.families.olmo2 import OLMO2
from radixgrove.protocol.model.families.olmoe import OLMOE
from radixgrove.protocol.model.families.phi3 import PHI3
from radixgrove.protocol.model.families.qwen2 import QWEN2
from radixgrove.protocol.model.families.qwen2_moe import QWEN2_MOE
from radixgrove.protocol.model.families.qwen3 import QWEN3
from radixgrove.protocol.model.families.qwen3_moe import QWEN3_MOE
from radixgrove.protocol.model.families.smollm3 import SMOLLM3
from radixgrove.protocol.model.families.stablelm import STABLELM
from radixgrove.protocol.model.families.starcoder2 import STARCODER2
from radixgrove.protocol.model.projections import check_quantization
from radixgrove.protocol.model.source import Source

_FAMILIES = (
    GEMMA3,
    GLM,
    GLM4,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a `config.json` describes.

    Both spellings of transformers are read: `rope_theta` + `rope_scaling` + `torch_dtype` (4.x) and
    `rope_parameters` + `dtype` (5.x).

    Raises:
        ModelError: unsupported architecture, activation, rope or quantization, or a missing or
            senseless size.
    """
    family = _family(raw)
    config = family.read(Source(raw, family.longest))
    check_quantization(config)
    return config


def _family(raw: Mapping[str, Any]) -> Family:
    found = raw.get("architectures") or []
    names = list(map(str, found if isinstance(found, list) else [found]))
    known = {family.architecture: family for family in _FAMILIES}
    for name in names:
        if name in known:
            return known[name]
    if not names:
        for family in _FAMILIES:
            if family.model_type == raw.get("model_type"):
                return family
    supported = ", ".join(sorted(known))
    raise ModelError(
        f"architecture not supported: {', '.join(names) or 'none named'}; supported are {supported}"
    )
