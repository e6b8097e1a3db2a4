"""What placement knows of a request with several prompts."""

from __future__ import annotations

from array import array

from radixgrove.protocol.blocks import MEMBER_BYTES
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.router.encoding import MAX_PATHS, _paths
from tests.router.publishing import HASHER

BLOCK = 16


def encoded(tokens: list[int]) -> EncodedPrompt:
    ids = array("i", tokens).tobytes()
    return EncodedPrompt(ids, HASHER.chain(ids))


def blocks(path: tuple[bytes, int]) -> tuple[int, int]:
    packed, shared = path
    return len(packed) // MEMBER_BYTES, shared


def test_what_prompts_share_is_known_to_be_shared() -> None:
    common = list(range(5 * BLOCK))
    prompts = [
        encoded([*common, 1]),
        encoded([*common, *range(100, 100 + 2 * BLOCK), 1]),
        encoded([*range(500, 500 + 3 * BLOCK), 1]),
        encoded([*common, 1]),
    ]
    paths = _paths(prompts, BLOCK, 7)
    assert [blocks(path) for path in paths] == [(7, 0), (5, 5), (5, 5), (3, 0)]
    assert paths[1][0] == paths[0][0][: 5 * MEMBER_BYTES]


def test_of_very_many_prompts_the_longest_are_looked_up() -> None:
    prompts = [encoded(list(range(number * BLOCK + 1))) for number in range(2 * MAX_PATHS)]
    paths = _paths(prompts, BLOCK, 7)
    assert [blocks(path)[0] for path in paths] == list(range(2 * MAX_PATHS - 1, MAX_PATHS - 1, -1))


def test_one_prompt_shares_nothing() -> None:
    assert [blocks(path) for path in _paths([encoded(list(range(33)))], BLOCK, 7)] == [(2, 0)]
