"""What a replica says about itself when it registers, and what its lease carries."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from radixgrove.protocol.blocks import HASH_SCHEME, BlockHasher
from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.foreign import decode_json

PROTOCOL_VERSION = 1
LEASE_SECONDS = 5.0
MAX_NUMBER = 1 << 53  # exact in Redis's scripts, which know nothing but doubles
ROUTER_LEASE_SECONDS = 5.0
LONGEST_LEASE_SECONDS = 120.0  # so three of the scripts have it, too


class LeaseState(IntEnum):
    NOT_READY = 0  # alive, but its engine's pulse is missing
    READY = 1
    DRAINING = 2  # finishes what it has, gets nothing new


class EngineInfo(msgspec.Struct, tag="info", kw_only=True):
    """Facts of an engine that is ready: sent once to its agent and frontends, and registered.

    `prefill_tokens_per_second` and `host_tokens_per_second` are measured by the worker; they turn
    tokens into milliseconds in the router's cost model. A host rate of 0 means no host tier.
    """

    page_size: int  # tokens
    max_model_len: int  # what is set, or the model's, shortened to what the KV pool holds
    num_pages: int = 0
    max_running: int = 0  # requests in a batch; 0: unknown
    vocab_size: int = 0
    dtype: str = ""  # of the weights
    kv_dtype: str = ""  # as the setting names it; "" as `dtype`
    device: str = ""  # "cpu", "NVIDIA H100 80GB HBM3", ...
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0  # with what layers with a window keep while a token is in it
    window_bytes_per_token: int = 0  # that part
    num_window_pages: int = 0  # of these layers; 0: they keep all pages
    attention_backend: str = ""
    prefill_tokens_per_second: float = 0.0  # 0: unknown
    host_pages: int = 0  # of the host tier
    host_tokens_per_second: float = 0.0


# Facts that release 0.1 has in the registration itself: written there, too, for its routers.
_FLAT = (
    "page_size",
    "max_model_len",
    "max_running",
    "vocab_size",
    "prefill_tokens_per_second",
    "host_tokens_per_second",
    "device",
)


def member_id(group: str, dp_rank: int, dp: int) -> str:
    """The replica id of a member of a group; a group of one member is its own."""
    return group if dp == 1 else f"{group}/{dp_rank}"


class Registration(msgspec.Struct, kw_only=True):
    """One replica of a service, one start of its engine."""

    replica_id: str  # `member_id` of the next three
    group: str = ""  # members of one live and die together, at one URL; "": the replica alone
    dp_rank: int = 0  # of the group's members, from 0
    dp: int = 1  # how many they are
    service: str
    url: str
    models: list[str]  # served names, the id first, aliases after it
    namespace: str  # names model, weight version, dtypes of weights and KV in the hash chain
    root: str  # `root_fingerprint`: proves the same cluster secret
    index_block: int  # tokens
    tokenizer_digest: str  # `tokenizer.TokenizerFiles.digest`
    engine: EngineInfo
    sharing: str = "private"
    weight_version: str = "0"  # release 0.1 has it in `namespace` alone
    output_format: str = ""  # the name of `tokenizer.TokenizerFiles.format`
    capabilities: list[str] = []  # `tokenizer.TokenizerFiles.capabilities`
    protocol_version: int = PROTOCOL_VERSION
    hash_scheme: str = HASH_SCHEME
    generation: str = ""  # set by the publisher, unique per registration

    def __post_init__(self) -> None:
        self.group = self.group or self.replica_id

    def encode(self) -> bytes:
        """As JSON that this release and the one before read."""
        fields = msgspec.to_builtins(self)
        return msgspec.json.encode({**{name: fields["engine"][name] for name in _FLAT}, **fields})

    @classmethod
    def decode(cls, data: bytes) -> Registration:
        """Of this release or the one before, which has the engine's facts in the registration.

        Raises:
            ValueError: it is malformed, or makes no sense.
        """
        fields = decode_json(data, dict[str, Any])
        if "engine" not in fields:
            fields["engine"] = {name: fields[name] for name in _FLAT if name in fields}
        try:
            registration = msgspec.convert(fields, type=cls)
        except msgspec.ValidationError as error:
            raise ValueError("malformed registration") from error
        registration.check()
        return registration

    # Where release 0.1 has these facts: code that was written for it finds them for one more.

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int) -> None:
        self.engine.max_model_len = tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.engine.prefill_tokens_per_second

    @prefill_tokens_per_second.setter
    def prefill_tokens_per_second(self, rate: float) -> None:
        self.engine.prefill_tokens_per_second = rate

    def identity(self) -> dict[str, str | int]:
        """What replicas of a service must agree on: a stray one would answer with another model.

        Those of another `weight_version` are of a rollout, which may change all of it.
        """
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
        if not 0 <= self.dp_rank < self.dp:
            raise ValueError(f"dp_rank: {self.dp_rank} is none of {self.dp} members, from 0")
        if self.replica_id != member_id(self.group, self.dp_rank, self.dp):
            raise ValueError(
                f"replica_id: {self.replica_id!r} is not member {self.dp_rank} of {self.group!r}"
            )
        if not self.models or not all(self.models):
            raise ValueError("models: at least one served name is needed")
        page, length = self.engine.page_size, self.engine.max_model_len
        if page < 1 or self.index_block < 1 or self.index_block % page:
            raise ValueError(
                f"index_block: {self.index_block} is not a multiple of page_size {page}"
            )
        if length < 1:
            raise ValueError(f"max_model_len: {length} is not positive")
        for name, value in msgspec.structs.asdict(self.engine).items():
            if not isinstance(value, str) and not 0 <= value <= MAX_NUMBER:
                raise ValueError(f"{name}: {value} is not from 0 to {MAX_NUMBER}")
        if not is_http_url(self.url):
            raise ValueError(f"url: {self.url!r} is no HTTP address")


def is_http_url(url: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False


class RegistrationRefused(InvalidInput):
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


class Measured(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica measures as it runs. Its lease is renewed with it; it stands beside the load
    of its generation, where release 0.1 does not look."""

    prefill_tokens_per_second: float = 0.0  # 0: not measured
    host_pages_total: int = 0
    host_pages_used: int = 0
    host_cached_tokens: int = 0  # counter since start; part of `LoadReport.cached_tokens`


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
        except (struct.error, OverflowError) as error:  # the latter: an infinite count
            raise ValueError("malformed lease") from error
