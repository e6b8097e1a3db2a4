"""What a replica says about itself when it registers, and what its lease carries."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec

from radixgrove.protocol.blocks import HASH_SCHEME, BlockHasher

PROTOCOL_VERSION = 1
LEASE_SECONDS = 5.0
ROUTER_LEASE_SECONDS = 5.0


class Role(StrEnum):
    """What a replica can do for a request; one that does all of it is `generate`."""

    GENERATE = "generate"


class LeaseState(IntEnum):
    NOT_READY = 0  # alive, but its engine's pulse is missing
    READY = 1
    DRAINING = 2  # finishes what it has, gets nothing new


class Registration(msgspec.Struct, kw_only=True):
    """One replica of a service, one start of its engine.

    `prefill_tokens_per_second` and `host_tokens_per_second` are measured by the worker; they turn
    tokens into milliseconds in the router's cost model. A host rate of 0 means no host tier.
    """

    replica_id: str
    service: str
    url: str
    models: list[str]  # served names, the id first, aliases after it
    namespace: str  # names model, weight version, dtypes of weights and KV in the hash chain
    root: str  # `root_fingerprint`: proves the same cluster secret
    index_block: int  # tokens
    page_size: int  # tokens; divides index_block
    tokenizer_digest: str  # `tokenizer.TokenizerFiles.digest`
    max_model_len: int
    max_running: int = 0  # requests in a batch; 0: unknown
    vocab_size: int = 0
    sharing: str = "private"
    roles: tuple[Role, ...] = (Role.GENERATE,)
    weight_version: str = "0"
    prefill_tokens_per_second: float = 0.0  # 0: unknown
    host_tokens_per_second: float = 0.0
    kv_tokens: int = 0
    device: str = ""
    dtype: str = ""  # of the weights
    kv_dtype: str = ""
    protocol_version: int = PROTOCOL_VERSION
    hash_scheme: str = HASH_SCHEME
    generation: str = ""  # set by the publisher, unique per registration

    def identity(self) -> dict[str, str | int]:
        """What all replicas of a service must agree on; anything else would corrupt placement."""
        return {
            "protocol_version": self.protocol_version,
            "hash_scheme": self.hash_scheme,
            "index_block": self.index_block,
            "tokenizer_digest": self.tokenizer_digest,
            "sharing": self.sharing,
            "model": self.models[0],
        }

    def check(self) -> None:
        """Raises ValueError naming the field that makes no sense."""
        if not self.models or not all(self.models):
            raise ValueError("models: at least one served name is needed")
        if self.page_size < 1 or self.index_block < 1 or self.index_block % self.page_size:
            raise ValueError(
                f"index_block: {self.index_block} is not a multiple of page_size {self.page_size}"
            )
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len: {self.max_model_len} is not positive")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} is no HTTP address")


class RegistrationRefused(Exception):
    """A replica disagrees with the service it wants to join; the message names the field."""


def disagreement(mine: Mapping[str, str | int], theirs: Mapping[str, str | int]) -> str:
    """Which fields of two identities differ, for a person to read."""
    return "; ".join(
        f"{name} is {mine.get(name)!r} here and {theirs.get(name)!r} there"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    )


def root_fingerprint(hasher: BlockHasher) -> str:
    """Equal exactly when secret and namespace are; says nothing of either."""
    return hasher.root[:8].hex()


def new_generation() -> str:
    """A name for one start of an engine that no other start has, on this Redis or a later one."""
    return secrets.token_hex(8)


class LoadReport(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's own view of its load, from its scheduler."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of waiting requests, less what its cache holds
    pages_total: int = 0
    pages_free: int = 0  # free or evictable at once
    prompt_tokens: int = 0  # counters since start
    cached_tokens: int = 0
    started_ms: int = 0  # wall clock at which this generation began

    # The scripts read the head of this layout too: lua/place.lua.
    _LAYOUT = struct.Struct("<IIIIIddd")

    def pack(self) -> bytes:
        limit = 0xFFFFFFFF
        return self._LAYOUT.pack(
            min(self.running, limit),
            min(self.waiting, limit),
            min(self.waiting_tokens, limit),
            min(self.pages_total, limit),
            min(self.pages_free, limit),
            self.prompt_tokens,
            self.cached_tokens,
            self.started_ms,
        )

    @classmethod
    def unpack(cls, data: bytes) -> LoadReport:
        running, waiting, tokens, total, free, prompt, cached, started = cls._LAYOUT.unpack(data)
        return cls(
            running=running,
            waiting=waiting,
            waiting_tokens=tokens,
            pages_total=total,
            pages_free=free,
            prompt_tokens=int(prompt),
            cached_tokens=int(cached),
            started_ms=int(started),
        )


class Lease(msgspec.Struct, frozen=True):
    """A generation's right to be placed on, until `expires_ms` of Redis's clock."""

    expires_ms: float
    state: LeaseState
    report: LoadReport

    _HEAD = struct.Struct("<dB")

    @classmethod
    def unpack(cls, data: bytes) -> Lease:
        """Raises ValueError when the record is not one of this protocol version."""
        head = cls._HEAD.size
        try:
            expires, state = cls._HEAD.unpack_from(data)
            return cls(expires, LeaseState(state), LoadReport.unpack(data[head:]))
        except struct.error as error:
            raise ValueError("malformed lease") from error
