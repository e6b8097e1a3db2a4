"""The named offline workloads, conversations, and the least time in which a device could do them.

Everything is drawn from `random.Random(seed)`, so every engine that is measured gets the same
requests.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

VOCABULARY = 10_000  # token ids are drawn below this


@dataclass(frozen=True, slots=True)
class Item:
    """One request: it ignores EOS, so its output length is exact."""

    token_ids: list[int]
    max_tokens: int
    shared: int = 0  # leading tokens that other requests of its group have too
    grammar: str | None = None  # of its output, as llguidance takes it: one that ends no sooner


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
    return Workload("nano256", _nano_items(random.Random(0)), temperature=0.6)


def nano512() -> Workload:
    """Those, and 256 more such requests: for two data-parallel members."""
    rng = random.Random(0)
    return Workload("nano512", _nano_items(rng) + _nano_items(rng), temperature=0.6)


def _nano_items(rng: random.Random) -> list[Item]:
    prompts = [_tokens(rng, rng.randint(100, 1024)) for _ in range(256)]
    return [Item(prompt, rng.randint(100, 1024)) for prompt in prompts]


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


def prefill_1x8k() -> Workload:
    """One request of 8,192 in and 1 out: its time to the first token; counts input tokens."""
    return Workload("prefill_1x8k", [Item(_tokens(random.Random(0), 8192), 1)], counts_input=True)


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
    for function in (
        nano256,
        nano512,
        bs1_decode,
        bs64_decode,
        bs256_decode,
        prefill_32x8k,
        prefill_1x8k,
        shared_prefix,
    )
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
    """Rates measured on the card: copies, and products of large matrices."""

    bytes_per_second: float
    flops_per_second: float  # of bfloat16
    fp8_flops_per_second: float | None = None  # None: not measured

    def product_rate(self, item_bytes: int) -> float:
        """FLOP/s of products with weights of so many bytes a value.

        Raises:
            ValueError: one byte, and the rate of FP8 has not been measured.
        """
        if item_bytes > 1:
            return self.flops_per_second
        if self.fp8_flops_per_second is None:
            raise ValueError("the rate of FP8 has not been measured on this card")
        return self.fp8_flops_per_second


H100 = Device(bytes_per_second=2.94e12, flops_per_second=729e12)
H200 = Device(bytes_per_second=4.3e12, flops_per_second=790e12, fp8_flops_per_second=1500e12)
DEVICES = {"H100": H100, "H200": H200}


def find_device(card: str) -> Device | None:
    """The rates of a card by the name that CUDA gives it; None where there are none."""
    return next((device for name, device in DEVICES.items() if name in card.split()), None)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a forward pass reads and multiplies.

    `expert_parameters` are those of one expert of each layer that has some; of `experts` a token
    takes `experts_per_token`.
    """

    matrix_parameters: int  # all linear layers, without embedding, head and experts
    head_parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int = 2  # of a value in the linear layers
    head_item_bytes: int = 2
    kv_item_bytes: int = 2
    expert_parameters: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def multiplied_parameters(self) -> int:
        """By a token, without the head."""
        return self.matrix_parameters + self.experts_per_token * self.expert_parameters

    def read_bytes(self, rows: int) -> float:
        """By a step of so many rows, which choose evenly: the experts that one of them takes."""
        read = float(self.matrix_parameters)
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** rows
            read += self.experts * (1 - missed) * self.expert_parameters
        return read * self.item_bytes + self.head_parameters * self.head_item_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_item_bytes

    @property
    def attention_flops_per_pair(self) -> float:
        """Of a query and a key that it sees, in all layers: score and weighted value."""
        return 4.0 * self.layers * self.heads * self.head_dim


def least_seconds(workload: Workload, shape: ModelShape, device: Device) -> float:
    """Least time of prefill's FLOPs, then of decoding, one after the other.

    Decoding takes as many steps as the longest output, all requests together. The products of a
    step take the longer of reading once the weights that they need and multiplying its rows by
    them; attention the longer of reading each request's whole context and multiplying it. Shared
    prefixes are computed once, and read once a step and group.

    Raises:
        ValueError: weights have one byte a value, and the device's rate of FP8 is not known.
    """
    product_rate = device.product_rate(shape.item_bytes)
    parameters = shape.multiplied_parameters + shape.head_parameters
    decoded = sorted(item.max_tokens - 1 for item in workload.items)
    products = 0.0
    for step in range(decoded[-1]):
        rows = len(decoded) - bisect_right(decoded, step)
        reading = shape.read_bytes(rows) / device.bytes_per_second
        products += max(reading, 2 * rows * parameters / product_rate)
    kv_read = attended = 0  # tokens of KV, summed over steps
    computed, pairs = 0, 0.0  # tokens of prefill, and what each sees
    for item in workload.items:
        own, steps = len(item.token_ids) - item.shared, item.max_tokens - 1
        own_contexts = steps * own + steps * (steps + 1) // 2
        kv_read += own_contexts
        attended += own_contexts + steps * item.shared
        computed += own
        pairs += _visible_pairs(own, item.shared)
    if workload.groups:
        prefix = max(item.shared for item in workload.items)
        kv_read += workload.groups * decoded[-1] * prefix
        computed += workload.groups * prefix
        pairs += workload.groups * _visible_pairs(prefix, 0)
    reading_kv = kv_read * shape.kv_bytes_per_token / device.bytes_per_second
    attending = attended * shape.attention_flops_per_pair / device.flops_per_second
    multiplied = (
        computed * shape.multiplied_parameters + len(workload.items) * shape.head_parameters
    )
    prefill = 2 * multiplied / product_rate
    prefill += pairs * shape.attention_flops_per_pair / device.flops_per_second
    return prefill + products + max(reading_kv, attending)


def _visible_pairs(tokens: int, cached: int) -> float:
    """Of a query and a key, for `tokens` after `cached` ones."""
    return tokens * cached + tokens * (tokens + 1) / 2
