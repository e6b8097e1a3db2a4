"""What processes of release 0.1 write to Redis and read there, kept as they were.

The `.lua` files beside this one are that release's own scripts.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

# Layout of a lease: end in ms, state, then the load report's seven numbers.
LEASE = struct.Struct("<dBIIIIIddd")
READY, DRAINING = 1, 2


def script(name: str) -> str:
    return (Path(__file__).parent / f"{name}.lua").read_text()


class Keys:
    """Names of one service's keys."""

    def __init__(self, prefix: str, service: str) -> None:
        base = f"{prefix}:{{{service}}}"
        self.services = f"{prefix}:services"
        self.identity = f"{base}:identity"
        self.replicas = f"{base}:replicas"
        self.leases = f"{base}:leases"
        self.sequences = f"{base}:sequences"
        self.routers = f"{base}:routers"
        self.reserved = f"{base}:reserved"
        self.pending = (f"{base}:pending:0", f"{base}:pending:1")
        self._base = base

    def tree(self, tier: str, generation: str) -> str:
        return f"{self._base}:{tier}:{generation}"

    def load(self, generation: str) -> str:
        return f"{self._base}:load:{generation}"


class Registration(msgspec.Struct, kw_only=True):
    """The engine's facts are fields of the registration itself."""

    replica_id: str
    service: str
    url: str
    models: list[str]
    namespace: str
    root: str
    index_block: int
    page_size: int
    tokenizer_digest: str
    max_model_len: int
    max_running: int = 0
    vocab_size: int = 0
    sharing: str = "private"
    roles: tuple[str, ...] = ("generate",)
    weight_version: str = "0"
    prefill_tokens_per_second: float = 0.0
    host_tokens_per_second: float = 0.0
    kv_tokens: int = 0
    device: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    protocol_version: int = 1
    hash_scheme: str = "blake2b-128-chain-v1"
    generation: str = ""

    def identity(self) -> dict[str, str | int]:
        return {
            "protocol_version": self.protocol_version,
            "hash_scheme": self.hash_scheme,
            "index_block": self.index_block,
            "tokenizer_digest": self.tokenizer_digest,
            "sharing": self.sharing,
            "model": self.models[0],
        }
