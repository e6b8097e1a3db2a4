"""Hash chains of token blocks, and the members that name them in the index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, BlockHasher, members

SECRET = b"a secret of the cluster"


def tokens(count: int, first: int = 0) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in range(first, first + count))


def test_a_chain_continues_from_its_parent() -> None:
    hasher = BlockHasher(SECRET, "model", 16)
    whole = hasher.chain(tokens(64))
    head = hasher.chain(tokens(32))
    assert head + hasher.chain(tokens(32, 32), head[-HASH_BYTES:]) == whole
    assert len(whole) == 4 * HASH_BYTES


def test_a_partial_block_has_no_hash() -> None:
    hasher = BlockHasher(SECRET, "model", 16)
    assert hasher.chain(tokens(31)) == hasher.chain(tokens(16))
    assert hasher.chain(tokens(15)) == b""


def test_identity_depends_on_everything_named() -> None:
    base = BlockHasher(SECRET, "model", 16).chain(tokens(16))
    others = [
        BlockHasher(b"another", "model", 16).chain(tokens(16)),
        BlockHasher(SECRET, "other model", 16).chain(tokens(16)),
        BlockHasher(SECRET, "model", 16).chain(tokens(16, 1)),
        BlockHasher(SECRET, "model", 16).chain(tokens(16), base),
        BlockHasher(SECRET + bytes(64), "model", 16).chain(tokens(16)),
    ]
    assert len({base, *others}) == 1 + len(others)


@given(st.integers(0, 20), st.integers(0, 2**64 - 1))
def test_members_are_heads_of_hashes_under_the_domain(count: int, domain64: int) -> None:
    chain = BlockHasher(SECRET, "model", 4).chain(tokens(4 * count))
    packed = members(chain, domain64)
    assert len(packed) == count * MEMBER_BYTES
    for i in range(count):
        head = chain[i * HASH_BYTES : i * HASH_BYTES + MEMBER_BYTES]
        expected = int.from_bytes(head, "little") ^ domain64
        assert int.from_bytes(packed[i * 8 : i * 8 + 8], "little") == expected
