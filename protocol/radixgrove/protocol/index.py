"""The scripts that keep the prefix index in Redis, and the packing of their arguments.

Every decision and every update is one atomic script on one service's keys. The scripts run on
Redis 6.2 to 8 and on Valkey. Hashes travel as one packed string, `MEMBER_BYTES` each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

BATCH_MEMBERS = 128  # of an event batch: one script call stays far below a millisecond
SNAPSHOT_CHUNK_MEMBERS = 512

OK = b"OK"
UNKNOWN = b"UNKNOWN"  # the generation is not registered (any more): register again
SUPERSEDED = b"SUPERSEDED"  # another process registered under the same replica id
DRAINING = b"DRAINING"
MISMATCH = b"MISMATCH"

_READ_REGISTRATIONS = frozenset({"heartbeat", "janitor", "register", "unregister"})


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the SHA-1 by which Redis knows it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """The named script of this package: `place`, `release`, `events`, …"""
    parts = ["registrations", name] if name in _READ_REGISTRATIONS else [name]
    folder = files("radixgrove.protocol").joinpath("lua")
    text = "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in parts)
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())
