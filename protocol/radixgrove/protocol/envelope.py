"""What a router sends a worker with a request."""

from __future__ import annotations

import msgspec

ENVELOPE_TYPE = "application/vnd.radixgrove+msgpack"
INTERNAL_KEY_HEADER = "x-radixgrove-key"


class Envelope(msgspec.Struct, kw_only=True):
    """A router's request to a worker: the client's body and what the router already knows.

    Accepted only with the internal key, since it carries the principal.
    """

    body: bytes  # the client's JSON, under a name that the worker serves
    prompts: list[bytes]  # token ids of each prompt, int32 little-endian
    principal: str
    # Unique, made by the router: the engine's ids are `<request_id>:<sequence>`, so that a worker's
    # report of admitted requests names the router's reservation.
    request_id: str
    # Digest of the tokenizer files that made `prompts`; another one at the worker: it encodes anew.
    tokenizer_digest: str
    # What the router expected to be cached, in tokens, for predicted-against-reported metrics.
    matched_tokens: int = 0
    # Which member of the group the router chose; None: the worker chooses.
    dp_rank: int | None = None
