"""Token blocks and their identity: a keyed hash chain.

A block is `block_size` consecutive token ids. Its identity is the chain (parent, tokens),
keyed with the cluster's secret: without it, no hash can be predicted or forged. The sharing
domain is deliberately not part of it: the same text has the same hash for every tenant, and the
domain is a field beside it (`member`).
"""

from __future__ import annotations

from hashlib import blake2b

HASH_BYTES = 16
MEMBER_BYTES = 8
TOKEN_BYTES = 4  # int32 little-endian
HASH_SCHEME = "blake2b-128-chain-v1"
PUBLIC_DOMAIN = "public"


class BlockHasher:
    """Hashes chains of blocks of one namespace: model, weight version, dtypes of weights and KV."""

    def __init__(self, secret: bytes, namespace: str, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        # blake2b takes keys of up to 64 bytes; a longer secret is compressed, not cut.
        self._key = secret if len(secret) <= 64 else blake2b(secret, digest_size=64).digest()
        self.block_size = block_size
        self.root = self._digest(b"radixgrove\x00" + namespace.encode())

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=HASH_BYTES, key=self._key).digest()

    def chain(self, token_ids: bytes, parent: bytes | None = None) -> bytes:
        """Hashes of all *full* blocks of `token_ids`, concatenated (`HASH_BYTES` each).

        Args:
            token_ids: int32 little-endian; a partial last block is left out.
            parent: hash of the block before the first one; the namespace's root when None.
        """
        step = self.block_size * TOKEN_BYTES
        full = len(token_ids) - len(token_ids) % step
        current = self.root if parent is None else parent
        key = self._key
        hashes = []
        for offset in range(0, full, step):
            block = current + token_ids[offset : offset + step]
            current = blake2b(block, digest_size=HASH_BYTES, key=key).digest()
            hashes.append(current)
        return b"".join(hashes)

    def domain64(self, domain: str) -> int:
        """64-bit tag of a sharing domain, XORed into members of the Redis index."""
        return int.from_bytes(
            self._digest(b"domain\x00" + domain.encode())[:MEMBER_BYTES], "little"
        )


def members(chain: bytes, domain64: int) -> bytes:
    """Index members of a packed chain: `chain64 XOR domain64`, `MEMBER_BYTES` each, packed."""
    # Every other 64-bit word is the head of a hash; strides keep this out of Python's loops.
    heads = memoryview(chain).cast("Q")[:: HASH_BYTES // MEMBER_BYTES].tobytes()
    mask = domain64.to_bytes(MEMBER_BYTES, "little") * (len(heads) // MEMBER_BYTES)
    wide = int.from_bytes(heads, "little") ^ int.from_bytes(mask, "little")
    return wide.to_bytes(len(heads), "little")
