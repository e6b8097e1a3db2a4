"""Each kernel at the sizes of the benchmark models: time, and the bandwidth or rate it reaches.

    python -m benchmarks.engine.bench_kernels [--only linear attention]

Times are medians of graph replays over inputs that together exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from radixgrove.kernels import (
    activation,
    attention,
    decode,
    moe,
    moe_tuning,
    norm,
    rope,
    routing,
    sample,
    top_k_top_p,
)
from radixgrove.kernels._triton import cdiv
from radixgrove.kernels.float8 import FLOAT8, to_page
from radixgrove.kernels.linear_candidates import (
    GEMV_CANDIDATES,
    SKINNY_CANDIDATES,
    Projection,
    candidates,
)
from radixgrove.kernels.matmul import CUBLAS, Choice, Scratch, multiply
from radixgrove.kernels.scaled import multiply_quantized
from radixgrove.kernels.skinny import MAX_SKINNY_TOKENS
from radixgrove.kernels.timing import replay_times
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations

DTYPE = torch.bfloat16
PAGE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's layer."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def weights(self) -> dict[str, tuple[int, int, bool]]:
        """Rows, columns, and whether SiLU-and-multiply follows."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (width, self.hidden, False),
            "o": (self.hidden, self.heads * self.head_dim, False),
            "gate_up": (2 * self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False),
            "head": (self.vocab, self.hidden, False),
        }


SHAPES = (
    Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936),
    Shape("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256),
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(DTYPE)


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median time of one call; `calls` do the same on different memory, one after another."""

    def run() -> None:
        for call in calls:
            call()

    for call in calls[:2]:
        call()
    _, *times = replay_times(run, 1 + repeats)
    return statistics.median(times) * 1e3 / len(calls)


def show(kernel: str, shape: str, us: float, moved: float = 0.0, flops: float = 0.0) -> None:
    """Print a row, with GB/s of bytes `moved` and TFLOP/s of `flops`."""
    bandwidth = f"{moved / us / 1e3:8.0f} GB/s" if moved else " " * 13
    rate = f"{flops / us / 1e6:7.0f} TFLOP/s" if flops else ""
    print(f"{kernel:<26}{shape:<34}{us:9.2f} us {bandwidth} {rate}", flush=True)
    results.record(
        {
            "benchmark": "kernels",
            "workload": f"{kernel.strip()}, {shape}",
            "model": None,
            "subject": "radixgrove",
            "metric": "time",
            "value": us,
            "unit": "us",
            "bytes": moved,
            "flops": flops,
        }
    )


def linear_calls(
    choice: Choice, x: Tensor, weights: list[Weight], silu: bool, scratch: Scratch
) -> list[Callable[[], object]]:
    return [
        partial(multiply, x, weight, choice=choice, scratch=scratch, silu=silu)
        for weight in weights
    ]


def bench_linear() -> None:
    """cuBLAS and every candidate of the tuner."""
    scratch = Scratch(torch.device("cuda", torch.cuda.current_device()))
    for shape in SHAPES:
        for name, (n, k, silu) in shape.weights().items():
            weights = cold_weights(n, k)
            for tokens in (1, 16, 64, 128, 256):
                x = random(tokens, k)
                choices = [CUBLAS]
                if tokens == 1:
                    choices += GEMV_CANDIDATES
                elif tokens <= MAX_SKINNY_TOKENS:
                    choices += SKINNY_CANDIDATES
                if scratch.cublaslt is not None:
                    configs = scratch.cublaslt.candidates(tokens, weights[0].payload, DTYPE)
                    choices += [Choice(cublaslt=config) for config in configs]
                timed = list(time_candidates(choices, x, weights, silu, scratch))
                cublas = timed[0][1]
                best, us = min(timed, key=lambda pair: pair[1])
                label = f"{shape.name} {name} T={tokens}"
                show("linear cuBLAS", label, cublas, n * k * 2, 2.0 * n * k * tokens)
                if best != CUBLAS:
                    print(f"    {best.gemv or best.skinny or 'an algorithm of cuBLASLt'}")
                    show("linear best", label, us, n * k * 2, 2.0 * n * k * tokens)
            del weights


def float8_weights(kind: str, n: int, k: int) -> list[Weight]:
    """As `cold_weights`; `kind` says what shares a scale."""
    return [float8_weight(kind, weight.payload) for weight in cold_weights(n, k)]


def float8_weight(kind: str, matrix: Tensor) -> Weight:
    """[..., N, K], whose numbers are mostly within ±1."""
    *stack, n, k = matrix.shape
    blocks = kind == "blocks"
    shape = (*stack, cdiv(n, 128), cdiv(k, 128)) if blocks else (*stack, n)
    return Weight(
        to_page(matrix * 448, FLOAT8),
        DTYPE,
        scales=torch.full(shape, 1 / 448, device="cuda"),
        block=(128, 128) if blocks else None,
        activations=Activations.GROUP if blocks else Activations.TOKEN,
        uniform=kind == "tensor",
    )


def bench_products_float8() -> None:
    """Every candidate of the tuner for float8 weights, inputs quantized within."""
    scratch = Scratch(torch.device("cuda", torch.cuda.current_device()))
    for shape in SHAPES:
        for name, (n, k, silu) in shape.weights().items():
            if name == "head":
                continue
            for kind, tokens in itertools.product(
                ("tensor", "row", "blocks"), (1, 16, 64, 256, 8192)
            ):
                weights = float8_weights(kind, n, k)
                projection = Projection(weights, silu=silu)
                x = random(tokens, k)
                for choice in candidates(tokens, projection, scratch)[1:]:  # but the widened one
                    calls = [
                        partial(
                            multiply_quantized, x, weight, choice=choice, scratch=scratch, silu=silu
                        )
                        for weight in weights
                    ]
                    label = f"{shape.name} {name} {kind} T={tokens}"
                    own = choice.gemv or choice.skinny
                    kernel = f"float8 {own or ('scaled' if choice.scaled else 'cublaslt')}"
                    try:
                        us = microseconds(calls)
                    except Exception as error:
                        print(f"    {label}: {choice} failed: {str(error).splitlines()[0][:100]}")
                        continue
                    show(kernel, label, us, n * k, 2.0 * n * k * tokens)


def cold_weights(n: int, k: int) -> list[Weight]:
    """So many that the L2 cache holds none of them when its turn comes again."""
    copies = max(2, int(2e8 / (n * k * 2)) + 1)
    return [Weight.plain(random(n, k) / k**0.5) for _ in range(min(copies, 32))]


def time_candidates(
    choices: list[Choice], x: Tensor, weights: list[Weight], silu: bool, scratch: Scratch
) -> Iterator[tuple[Choice, float]]:
    for candidate in choices:
        try:
            yield candidate, microseconds(linear_calls(candidate, x, weights, silu, scratch))
        except Exception as error:
            print(f"    {candidate} failed: {str(error).splitlines()[0][:100]}")


def bench_elementwise() -> None:
    for shape in SHAPES:
        hidden, width = shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        weight, head_norm = random(hidden), random(shape.head_dim)
        for tokens in (1, 64, 256, 8192):
            copies = 16 if tokens <= 256 else 4
            label = f"{shape.name} T={tokens}"
            xs = [random(tokens, hidden) for _ in range(copies)]
            us = microseconds([partial(norm.rms_norm, x, weight, 1e-6) for x in xs])
            show("rms_norm", label, us, 2 * tokens * hidden * 2)
            gates = [random(tokens, 2 * shape.inner) for _ in range(copies)]
            us = microseconds([partial(activation.silu_and_mul, g) for g in gates])
            show("silu_and_mul", label, us, 3 * tokens * shape.inner * 2)
            qkvs = [random(tokens, width) for _ in range(copies)]
            pages = random(2, tokens // PAGE + 1, PAGE, shape.kv_heads, shape.head_dim)
            index = torch.arange(tokens, device="cuda")
            table = torch.randn(tokens, shape.head_dim, device="cuda")
            us = microseconds(
                [
                    partial(rope.rope_store, q, table, index, index, pages, head_norm, head_norm)
                    for q in qkvs
                ]
            )
            show("rope_store + qk norm", label, us, 2 * tokens * width * 2)


def bench_attention() -> None:
    for shape in SHAPES:
        for batch, context in ((1, 640), (1, 8192), (64, 400), (64, 4096), (256, 800)):
            q, pages, where = decode_inputs(shape, batch, context)
            moved = batch * context * shape.kv_heads * shape.head_dim * 4
            calls = [partial(decode.decode_attention, q, p, *where) for p in cold_pools(pages)]
            show("decode", f"{shape.name} {batch}x{context}", microseconds(calls), moved)
        for groups, size in ((32, 8), (16, 16), (1, 64)):
            bench_prefixes(shape, groups, size, prefix=2048, own=192)
        bench_extend(shape)


def cold_pools(pages: Tensor) -> list[Tensor]:
    """So many that the L2 cache holds none of them when its turn comes again."""
    copies = min(64, max(2, int(2.5e8 / pages.nbytes) + 1))
    return [pages, *(pages.clone() for _ in range(copies - 1))]


def bench_prefixes(shape: Shape, groups: int, size: int, prefix: int, own: int) -> None:
    """Decode of rows that have a prefix in common, each reading it, and read once for all."""
    batch, context = groups * size, prefix + own
    shared, private = prefix // PAGE, own // PAGE
    total = groups * shared + batch * private
    pages = random(2, total, PAGE, shape.kv_heads, shape.head_dim)
    order = torch.randperm(total, device="cuda").int()
    common = order[: groups * shared].view(groups, 1, shared).expand(-1, size, -1)
    behind = order[groups * shared :].view(groups, size, private)
    table = torch.cat((common, behind), dim=2).reshape(batch, -1).contiguous()
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    width = decode.tile_rows(shape.heads, shape.kv_heads)
    tiles = torch.full((groups * -(-size // width), width), -1, dtype=torch.int32, device="cuda")
    tiles.view(groups, -1)[:, :size] = rows.view(groups, size)
    prefixes = decode.SharedPrefixes(tiles, lens.new_full((len(tiles),), prefix), lens - own)
    q = random(batch, shape.heads, shape.head_dim)
    workspace = decode.DecodeWorkspace(batch, shape.heads, shape.kv_heads, shape.head_dim, q.device)
    label = f"{shape.name} {groups}x{size} {prefix}+{own}"
    moved = (groups * prefix + batch * own) * shape.kv_heads * shape.head_dim * 4
    for name, given in (("decode", None), ("decode, prefixes once", prefixes)):
        calls = [
            partial(
                decode.decode_attention, q, p, rows, lens, table, 0.1, workspace, prefixes=given
            )
            for p in cold_pools(pages)
        ]
        show(name, label, microseconds(calls), moved)


def decode_inputs(shape: Shape, batch: int, context: int) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Queries, pages, and the arguments of `decode_attention` behind them."""
    counts = -(-context // PAGE)
    pages = random(2, batch * counts + 1, PAGE, shape.kv_heads, shape.head_dim)
    order = torch.randperm(batch * counts, device="cuda").int().view(batch, counts)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = random(batch, shape.heads, shape.head_dim)
    workspace = decode.DecodeWorkspace(batch, shape.heads, shape.kv_heads, shape.head_dim, q.device)
    return q, pages, (rows, lens, order, 0.1, workspace)


def bench_float8() -> None:
    """Attention over float8 pages, beside bfloat16's; decode as cut up by default, and at best."""
    configs = [
        decode.DecodeConfig(*choice)
        for choice in itertools.product((32, 64, 128), (2, 4, 6), (2, 4), (3, 4, 6))
        if choice[0] * choice[1] <= 512  # beyond, shared memory may not do
    ]
    for shape in SHAPES:
        for batch, context in ((1, 8192), (16, 4096), (64, 400), (64, 4096), (256, 800)):
            q, pages, where = decode_inputs(shape, batch, context)
            label = f"{shape.name} {batch}x{context}"
            values = 2 * batch * context * shape.kv_heads * shape.head_dim
            for name, kept in (("", pages), (", float8", to_page(pages, FLOAT8))):
                call = partial(decode.decode_attention, q, kept, *where)
                show(f"decode{name}", label, microseconds([call] * 4), values * kept.itemsize)
            times = {config: microseconds([partial(call, config=config)] * 4) for config in configs}
            best = min(times, key=lambda config: times[config])
            cut = f"{best.block_n}/{best.stages}/{best.warps}/{best.programs}"
            show("decode, float8, best", f"{label} {cut}", times[best], values)
        bench_extend(shape, FLOAT8)


def bench_rope_decode() -> None:
    """Decode attention behind `rope_store`, and in one kernel with it."""
    for shape in SHAPES:
        norms = random(2, shape.head_dim).unbind() if shape.name.startswith("qwen3") else ()
        for batch, context in ((1, 640), (8, 640), (64, 200), (64, 800), (256, 200), (256, 800)):
            counts = -(-context // PAGE)
            pages = random(2, batch * counts + 1, PAGE, shape.kv_heads, shape.head_dim)
            order = torch.randperm(batch * counts, device="cuda").int().view(batch, counts)
            rows = torch.arange(batch, dtype=torch.int32, device="cuda")
            lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            positions = lens.long() - 1
            slots = order[:, -1].long() * PAGE + positions % PAGE
            angles = torch.randn(context, shape.head_dim, device="cuda")
            qkv = random(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
            workspace = decode.DecodeWorkspace(
                batch, shape.heads, shape.kv_heads, shape.head_dim, qkv.device
            )
            where = (rows, lens, order, 0.1, workspace)
            store = partial(rope.rope_store, qkv, angles, positions, slots, pages, *norms)
            attend = partial(decode.decode_attention, random(batch, shape.heads, shape.head_dim))
            fused = partial(decode.rope_decode_attention, qkv, angles, pages, *where, *norms)
            moved = batch * context * shape.kv_heads * shape.head_dim * 4
            label = f"{shape.name} {batch}x{context}"
            apart = 2 * microseconds([store, partial(attend, pages, *where)] * 4)
            show("rope_store, decode", label, apart, moved)
            show("rope in decode", label, microseconds([fused] * 4), moved)


def bench_extend(shape: Shape, kv_dtype: torch.dtype = DTYPE) -> None:
    tokens = 8192
    pages = to_page(random(2, tokens // PAGE + 1, PAGE, shape.kv_heads, shape.head_dim), kv_dtype)
    order = torch.randperm(tokens // PAGE, device="cuda").int().view(1, -1)
    one = torch.zeros(1, dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    q = random(tokens, shape.heads, shape.head_dim)
    us = microseconds(
        [lambda: attention.extend_attention(q, pages, one, indptr, indptr[1:], order, 0.1, tokens)]
    )
    flops = 2.0 * tokens * tokens * shape.heads * shape.head_dim
    name = "extend" if kv_dtype == DTYPE else "extend, float8"
    show(name, f"{shape.name} T={tokens}", us, 0.0, flops)


EXPERTS = {  # experts, of a token, hidden and inner size
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}


def bench_experts() -> None:
    """A layer's experts by the tuner's choice, in bf16 and float8, and by `grouped_mm`; the bytes
    are those of the experts that random logits choose."""
    for name, (experts, top_k, hidden, inner) in EXPERTS.items():
        router = routing.Router(routing.Routing(top_k, renormalize=True))
        for kind in ("bf16", "row", "blocks"):
            layers = [expert_layer(kind, experts, hidden, inner, router) for _ in range(4)]
            item = layers[0].gate_up.payload.element_size()
            for tokens in (1, 4, 16, 64, 256, 1024, 8192):
                x, logits = random(tokens, hidden), torch.randn(tokens, experts, device="cuda")
                used = len(routing.route_reference(logits, router).ids.unique())
                moved = used * 3.0 * hidden * inner * item
                flops = 6.0 * tokens * top_k * hidden * inner
                time = partial(time_experts, x, logits, layers)
                chosen = moe_tuning.search(tokens, layers[0], partial(min, key=time))
                label = f"{name} T={tokens}, {used} experts"
                kernel = "experts" if kind == "bf16" else f"experts float8 {kind}"
                show(kernel, label, time(chosen), moved, flops)
                print(f"    {chosen}", flush=True)
                if kind == "bf16":
                    show("grouped_mm", label, time(moe.GROUPED), moved, flops)
            del layers


def expert_layer(
    kind: str, experts: int, hidden: int, inner: int, router: routing.Router
) -> moe.ExpertWeights:
    matrices = (
        random(experts, rows, columns) / columns**0.5
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )
    make = Weight.plain if kind == "bf16" else partial(float8_weight, kind)
    return moe.ExpertWeights(*map(make, matrices), router)


def time_experts(
    x: Tensor, logits: Tensor, layers: list[moe.ExpertWeights], choice: moe.ExpertChoice
) -> float:
    """Routing and sorting included."""
    return microseconds([partial(moe.experts, x, logits, y, choice=choice) for y in layers])


def bench_sampling() -> None:
    for shape in SHAPES:
        for batch in (1, 64, 256):
            logits = random(batch, shape.vocab)
            temperature = torch.full((batch,), 0.6, device="cuda")
            index = torch.arange(batch, device="cuda")
            top_k = torch.full((batch,), 50, dtype=torch.int32, device="cuda")
            top_p = torch.full((batch,), 0.95, device="cuda")
            label = f"{shape.name} B={batch}"
            us = microseconds([partial(sample.sample, logits, temperature, index, index)] * 4)
            show("sample", label, us, batch * shape.vocab * 2)
            us = microseconds([partial(sample.argmax, logits)] * 4)
            show("argmax", label, us, batch * shape.vocab * 2)
            us = microseconds([partial(torch.argmax, logits, -1)] * 4)
            show("torch argmax", label, us, batch * shape.vocab * 2)
            for values in (logits, logits.float()):
                call = partial(
                    top_k_top_p.sampling_thresholds, values, temperature, top_k, top_p, top_p * 0.0
                )
                kind = str(values.dtype).removeprefix("torch.")
                show(f"thresholds {kind}", label, microseconds([call] * 4))


BENCHES = {
    "linear": bench_linear,
    "products_float8": bench_products_float8,
    "elementwise": bench_elementwise,
    "attention": bench_attention,
    "float8": bench_float8,
    "rope_decode": bench_rope_decode,
    "experts": bench_experts,
    "sampling": bench_sampling,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(BENCHES), choices=BENCHES)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    for name in arguments.only:
        BENCHES[name]()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
