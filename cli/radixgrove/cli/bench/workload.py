"""Requests to send: from a trace, or made up with shared prefixes.

A request is a list of blocks; a block is a number and a length, and becomes the same text wherever
the number is the same. So a prompt's shared prefix is described in a few bytes, and the processes
that send it make the text themselves. A trace may also give prompts as token ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from radixgrove.protocol.errors import InvalidInput

# Common words: each is one token, or close to it, in every usual vocabulary.
_VOCABULARY = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line member law car city
"""
_WORDS = _VOCABULARY.split()
_CHARACTERS_A_TOKEN = 5.5
_MAX_REQUESTS = 1_000_000


class WorkloadError(InvalidInput, ValueError):
    """The trace or the numbers make no workload."""


class Block(msgspec.Struct, array_like=True, frozen=True):
    number: int
    characters: int


class PlannedRequest(msgspec.Struct, frozen=True):
    at: float  # seconds from the start; 0 throughout in a closed loop
    blocks: list[Block]
    output_tokens: int
    token_ids: list[int] | None = None  # the prompt itself, in place of blocks
    seed: int | None = None

    def prompt(self) -> str | list[int]:
        if self.token_ids is not None:
            return self.token_ids
        return "".join(block_text(block) for block in self.blocks)


def block_text(block: Block) -> str:
    """Exactly `characters` of text that depends on the number alone."""
    source = random.Random(block.number)
    words: list[str] = []
    length = 0
    while length < block.characters:
        word = source.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words).ljust(block.characters)[: block.characters - 1] + "\n"


class _TraceLine(msgspec.Struct):
    """A line has `hash_ids` or `token_ids`; without a timestamp it is sent at the start."""

    output_length: int
    timestamp: float = 0.0  # milliseconds
    hash_ids: list[int] = []
    token_ids: list[int] | None = None
    seed: int | None = None


def read_trace(
    path: Path,
    *,
    block_characters: int,
    limit: int | None = None,
    speed: float = 1.0,
) -> list[PlannedRequest]:
    """Requests of a trace, a JSON object a line.

    Each has `output_length`, and `hash_ids`, each of which is a block of `block_characters`, or
    `token_ids`, the prompt itself; at will `timestamp` (ms) and `seed`. `speed` 2 sends twice as
    fast.

    Raises:
        WorkloadError: a line is malformed; the text names it.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    planned: list[PlannedRequest] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if limit is not None and len(planned) >= limit:
                break
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise WorkloadError(f"line {number} of the trace is malformed") from None
            if not line.hash_ids and not line.token_ids:
                raise WorkloadError(f"line {number} of the trace has no prompt")
            planned.append(
                PlannedRequest(
                    line.timestamp / 1000 / speed,
                    [Block(item, block_characters) for item in line.hash_ids],
                    max(1, line.output_length),
                    line.token_ids,
                    line.seed,
                )
            )
    if not planned:
        raise WorkloadError("the trace has no requests")
    return [_at(request, request.at - planned[0].at) for request in planned]


def _at(request: PlannedRequest, at: float) -> PlannedRequest:
    return msgspec.structs.replace(request, at=at)


def synthesize(
    *,
    requests: int,
    input_tokens: int,
    output_tokens: int,
    prefix_tokens: int,
    prefixes: int,
    seed: int,
) -> list[PlannedRequest]:
    """Requests of one size, each behind one of `prefixes` shared beginnings, in random order.

    Raises:
        WorkloadError: the numbers contradict each other.
    """
    if not 0 < requests <= _MAX_REQUESTS:
        raise WorkloadError(f"between 1 and {_MAX_REQUESTS} requests can be sent")
    if prefix_tokens >= input_tokens:
        raise WorkloadError(
            f"the shared prefix, --prefix-tokens {prefix_tokens}, must be shorter than the input, "
            f"--input-tokens {input_tokens}"
        )
    source = random.Random(seed)
    characters = int(prefix_tokens * _CHARACTERS_A_TOKEN)
    rest = max(1, int((input_tokens - prefix_tokens) * _CHARACTERS_A_TOKEN))
    # Another seed, other numbers: no cache of an earlier run helps.
    base = source.getrandbits(48) << 24
    planned: list[PlannedRequest] = []
    for index in range(requests):
        blocks = []
        if characters:
            blocks.append(Block(base + source.randrange(prefixes), characters))
        blocks.append(Block(base + prefixes + index, rest))
        planned.append(PlannedRequest(0.0, blocks, output_tokens))
    return planned


def spread(planned: Iterable[PlannedRequest], rate: float, seed: int) -> Iterator[PlannedRequest]:
    """The same requests with Poisson arrivals of `rate` a second."""
    source = random.Random(seed)
    at = 0.0
    for request in planned:
        yield _at(request, at)
        at += source.expovariate(rate)
