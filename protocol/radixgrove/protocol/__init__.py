"""What the parts of Radixgrove say to each other, and to clients.

The names below may be used by other programs; the rest of the package may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixgrove.protocol.lazy import exports

if TYPE_CHECKING:
    from radixgrove.protocol.blocks import BlockHasher as BlockHasher
    from radixgrove.protocol.endpoints import ENDPOINTS as ENDPOINTS
    from radixgrove.protocol.endpoints import Endpoint as Endpoint
    from radixgrove.protocol.errors import Defect as Defect
    from radixgrove.protocol.errors import Interrupted as Interrupted
    from radixgrove.protocol.errors import InvalidInput as InvalidInput
    from radixgrove.protocol.errors import LibraryError as LibraryError
    from radixgrove.protocol.errors import PeerError as PeerError
    from radixgrove.protocol.errors import RadixgroveError as RadixgroveError
    from radixgrove.protocol.errors import StartFailed as StartFailed
    from radixgrove.protocol.keys import ServiceKeys as ServiceKeys
    from radixgrove.protocol.model.config import ModelConfig as ModelConfig
    from radixgrove.protocol.model.config import ModelError as ModelError
    from radixgrove.protocol.model.directory import ModelDirectory as ModelDirectory
    from radixgrove.protocol.model_table import ModelEntry as ModelEntry
    from radixgrove.protocol.model_table import ModelTable as ModelTable
    from radixgrove.protocol.openai.errors import ApiError as ApiError
    from radixgrove.protocol.openai.parsing import parse_chat as parse_chat
    from radixgrove.protocol.openai.parsing import parse_completion as parse_completion
    from radixgrove.protocol.openai.requests import ChatRequest as ChatRequest
    from radixgrove.protocol.openai.requests import CompletionRequest as CompletionRequest
    from radixgrove.protocol.openai.requests import ModelLimits as ModelLimits
    from radixgrove.protocol.openai.sampling import SamplingParams as SamplingParams
    from radixgrove.protocol.registry import EngineInfo as EngineInfo
    from radixgrove.protocol.registry import Lease as Lease
    from radixgrove.protocol.registry import LeaseState as LeaseState
    from radixgrove.protocol.registry import LoadReport as LoadReport
    from radixgrove.protocol.registry import Registration as Registration
    from radixgrove.protocol.settings import RouterSettings as RouterSettings
    from radixgrove.protocol.settings import WorkerSettings as WorkerSettings
    from radixgrove.protocol.text.prompts import PromptEncoder as PromptEncoder
    from radixgrove.protocol.text.tokenizer import TokenizerFiles as TokenizerFiles

_HOMES = {
    "blocks": ["BlockHasher"],
    "endpoints": ["ENDPOINTS", "Endpoint"],
    "errors": [
        "Defect",
        "Interrupted",
        "InvalidInput",
        "LibraryError",
        "PeerError",
        "RadixgroveError",
        "StartFailed",
    ],
    "keys": ["ServiceKeys"],
    "model.config": ["ModelConfig", "ModelError"],
    "model.directory": ["ModelDirectory"],
    "model_table": ["ModelEntry", "ModelTable"],
    "openai.errors": ["ApiError"],
    "openai.parsing": ["parse_chat", "parse_completion"],
    "openai.requests": ["ChatRequest", "CompletionRequest", "ModelLimits"],
    "openai.sampling": ["SamplingParams"],
    "registry": ["EngineInfo", "Lease", "LeaseState", "LoadReport", "Registration"],
    "settings": ["RouterSettings", "WorkerSettings"],
    "text.prompts": ["PromptEncoder"],
    "text.tokenizer": ["TokenizerFiles"],
}

__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = exports(__name__, _HOMES)
