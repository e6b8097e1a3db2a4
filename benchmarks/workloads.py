"""The named offline workloads, conversations, and the least time in which a device could do them.

Everything is drawn from `random.Random(seed)`, so every engine that is measured gets the same
requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

VOCABULARY = 10_000  # token ids are drawn below this


@dataclass(frozen=True, slots=True)
class Item:
    """One request: it ignores EOS, so its output length is exact."""

    token_ids: list[int]
    max_tokens: int
    shared: int = 0  # leading tokens that other requests of its group have too


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    items: list[Item]
    temperature: float = 0.0
    counts_input: bool = False  # the figure is input tokens a second
    groups: int = 0  # groups of requests with `Item.shared` tokens in common

    @property
    def input_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.max_tokens for item in self.items)

    @property
    def counted_tokens(self) -> int:
        return self.input_tokens if self.counts_input else self.output_tokens


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, VOCABULARY) for _ in range(count)]


def nano256() -> Workload:
    """256 requests, input and output lengths uniform in 100..1024, temperature 0.6.

    The draws come in the order of nano-vllm's benchmark: 133,966 output tokens.
    """
    rng = random.Random(0)
    prompts = [_tokens(rng, rng.randint(100, 1024)) for _ in range(256)]
    items = [Item(prompt, rng.randint(100, 1024)) for prompt in prompts]
    return Workload("nano256", items, temperature=0.6)


def bs1_decode() -> Workload:
    """One request, 128 in, 512 out, greedy."""
    return Workload("bs1_decode", [Item(_tokens(random.Random(0), 128), 512)])


def bs64_decode() -> Workload:
    """64 requests, 128 in, 512 out, greedy."""
    rng = random.Random(0)
    return Workload("bs64_decode", [Item(_tokens(rng, 128), 512) for _ in range(64)])


def bs256_decode() -> Workload:
    """256 requests, 128 in, 256 out, greedy: nearly all steps decode the whole batch."""
    rng = random.Random(0)
    return Workload("bs256_decode", [Item(_tokens(rng, 128), 256) for _ in range(256)])


def prefill_32x8k() -> Workload:
    """32 requests of 8,192 in and 1 out; counts input tokens."""
    rng = random.Random(0)
    items = [Item(_tokens(rng, 8192), 1) for _ in range(32)]
    return Workload("prefill_32x8k", items, counts_input=True)


def shared_prefix() -> Workload:
    """32 groups of 16 requests: 2,048 tokens of the group's, 128 own, 128 out; shuffled."""
    rng = random.Random(0)
    items = []
    for _ in range(32):
        prefix = _tokens(rng, 2048)
        items += [Item(prefix + _tokens(rng, 128), 128, shared=2048) for _ in range(16)]
    rng.shuffle(items)
    return Workload("shared_prefix", items, groups=32)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    function.__name__: function
    for function in (nano256, bs1_decode, bs64_decode, bs256_decode, prefill_32x8k, shared_prefix)
}


# ---- conversations ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Clients take turns, round after round; each sends its whole history and new tokens.

    A history is all that a client has sent and got, so its length is known beforehand.
    """

    clients: int = 64
    rounds: int = 8
    new_tokens: int = 1024  # a client sends in a round, after its history
    output_tokens: int = 64

    def turns(self) -> Iterator[tuple[int, int]]:
        """(round, client), both from 0, in the order of sending."""
        return itertools.product(range(self.rounds), range(self.clients))

    def messages(self) -> list[list[list[int]]]:
        """The new tokens of each client and round."""
        rng = random.Random(0)
        return [
            [_tokens(rng, self.new_tokens) for _ in range(self.rounds)] for _ in range(self.clients)
        ]

    def history_tokens(self, completed: int) -> int:
        """A client's history after so many rounds."""
        return completed * (self.new_tokens + self.output_tokens)

    @property
    def prompt_tokens(self) -> int:
        return self.clients * sum(
            self.history_tokens(number) + self.new_tokens for number in range(self.rounds)
        )

    @property
    def best_hit_share(self) -> float:
        """Of the prompt tokens after the first round, those in a history."""
        histories = sum(map(self.history_tokens, range(1, self.rounds)))
        return histories / (histories + (self.rounds - 1) * self.new_tokens)


# ---- the limit -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """Rates measured on the card."""

    bytes_per_second: float
    flops_per_second: float


H100 = Device(bytes_per_second=2.94e12, flops_per_second=729e12)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a forward pass reads and multiplies."""

    matrix_parameters: int  # all linear layers, without embedding and head
    head_parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int = 2
    kv_item_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_item_bytes


def least_seconds(workload: Workload, shape: ModelShape, device: Device) -> float:
    """Bytes that decoding must move plus FLOPs that prefill must do, without overlap.

    Decoding reads the weights once a step, for as many steps as the longest output takes with all
    requests together, and each request's whole context a token; shared prefixes are computed once,
    and read once a step and group.
    """
    steps = max(item.max_tokens for item in workload.items) - 1
    weights = steps * (shape.matrix_parameters + shape.head_parameters) * shape.item_bytes
    contexts = 0
    flops = 0.0
    for item in workload.items:
        own = len(item.token_ids) - item.shared
        decoded = item.max_tokens - 1
        contexts += decoded * own + decoded * (decoded + 1) // 2
        flops += _prefill_flops(shape, own, item.shared) + 2 * shape.head_parameters
    if workload.groups:
        prefix = max(item.shared for item in workload.items)
        contexts += workload.groups * steps * prefix
        flops += workload.groups * _prefill_flops(shape, prefix, 0)
    moved = weights + contexts * shape.kv_bytes_per_token
    return moved / device.bytes_per_second + flops / device.flops_per_second


def _prefill_flops(shape: ModelShape, tokens: int, cached: int) -> float:
    """Of `tokens` after `cached` ones: two a parameter, four a visible pair and dimension."""
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    attention = 4.0 * pairs * shape.layers * shape.heads * shape.head_dim
    return 2.0 * tokens * shape.matrix_parameters + attention
