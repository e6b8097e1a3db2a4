"""Compile every kernel for compute capability 9.0 through its real launcher, without a GPU.

A process of its own: Triton must not be in interpreter mode here. Prints one line a kernel:
name, registers a thread, bytes of stack (spills), bytes of shared memory.

    python compile_sm90.py [bfloat16 | float32 | products | decode | experts]

Without an argument, a form or two of each kernel; with `bfloat16` or `float32`, all that is
launched for that type. With `products`: the products that the tuner asks about for the models of
the benchmarks; with `decode`: decode attention from their projections, for few, many and very many
rows; with `experts`: what the tuner asks about for a layer of Qwen3-30B-A3B and of Mixtral-8x7B.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from radixgrove.kernels import (
    activation,
    all_reduce,
    attention,
    bitmask,
    decode,
    decode_inputs,
    gather,
    gemv,
    int8,
    moe,
    moe_tuning,
    norm,
    pages,
    penalties,
    quantize,
    rope,
    routing,
    sample,
    skinny,
    token_mail,
    top_k_top_p,
)
from radixgrove.kernels.compilers import CompileOnly
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.linear_candidates import (
    GEMV_CANDIDATES,
    SKINNY_CANDIDATES,
    Projection,
    own_candidates,
)
from radixgrove.kernels.matmul import Scratch, multiply
from radixgrove.kernels.scaled import feed, multiply_quantized
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.config import ClampedSwiGlu
from radixgrove.protocol.model.quantization import Activations

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MIXED_LANES = re.compile(r"mul\.wide\.u32\s[^;]*, 2147483648;")
MODULES = (
    activation,
    all_reduce,
    attention,
    decode,
    gather,
    gemv,
    int8,
    moe,
    norm,
    pages,
    quantize,
    routing,
    sample,
    skinny,
    rope,
    decode_inputs,
    token_mail,
    top_k_top_p,
)


def compile_only() -> None:
    """Launches compile and print; nothing runs."""
    driver.set_active(CompileOnly(90))
    run = JITFunction.run
    seen: set[str] = set()

    def compile_and_print(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            refuse_mixed_lanes(self.fn.__name__, kernel.asm["ptx"])
            registers, stack = resources(kernel.asm["cubin"])
            print(self.fn.__name__, registers, stack, kernel.metadata.shared, flush=True)
        return kernel

    JITFunction.run = compile_and_print
    for module in MODULES:
        if hasattr(module, "pdl"):
            setattr(module, "pdl", always_pdl)  # noqa: B010
    setattr(decode, "_multiprocessors", multiprocessors)  # noqa: B010
    setattr(sample, "_has_fast_logarithm", lambda x: True)  # noqa: B010


def refuse_mixed_lanes(name: str, ptx: str) -> None:
    """Raise RuntimeError for code that LLVM has translated wrongly.

    Its vectorizer may pair `lane & 31` with `(lane & 7) << 2`; of shifting the pair by 31 and by 2
    at once, bits of the first reach the second, and a store goes astray (Triton 3.6.0).
    """
    if MIXED_LANES.search(ptx):
        raise RuntimeError(f"{name}: LLVM mixes lanes of a vector here; take other tile sizes")


def always_pdl(x: torch.Tensor) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True}


def multiprocessors(device: torch.device) -> int:
    return 132


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])


def launch_all(dtype: torch.dtype, *, few: bool = False) -> None:
    """Every kernel at the shape of a Qwen3 layer, in every form or in `few`."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    kv_heads, dim, hidden = 8, 128, 1024
    index32, index64 = zeros(4, kind=torch.int32), zeros(4, kind=torch.int64)
    x, weight = zeros(4, hidden), zeros(hidden)
    norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, zeros(4, hidden), weight, 1e-6)
    activation.silu_and_mul(zeros(4, 2 * hidden))
    gather.embed(zeros(64, hidden), index32)
    layer = zeros(2, 8, 16, kv_heads, dim)
    pool = layer.unsqueeze(0)
    pages.gather_pages(pool, index64[:3], zeros(3, *pool.shape[:2], *pool.shape[3:]))
    pages.scatter_pages(pool, index64[:3], zeros(3, *pool.shape[:2], *pool.shape[3:]))
    host = zeros(3, *pool.shape[:2], *pool.shape[3:])
    pages.scatter_layer(pool, 0, index64[:3], host, index64[:3])
    table = zeros(9, 64, kind=torch.int32)
    indptr, flat = zeros(5, kind=torch.int32), zeros(64, kind=torch.int32)
    pages.kv_indices(index32, index32, table, 16, indptr, flat, index32.clone())
    lens, tokens_known = zeros(9, kind=torch.int32), zeros(9, 64, kind=torch.int32)
    decode_inputs.gather_rows(
        index64, lens, tokens_known, table, 16, index32, index32, index64, index32, index64
    )
    inputs = (index64, lens, tokens_known, table, 16, index32, index32, index64, index32, index64)
    decode_inputs.gather_rows(*inputs, zeros(64, hidden), zeros(4, hidden))
    decode_inputs.gather_rows(*inputs, zeros(64, hidden), zeros(4, hidden), table, index64)
    addresses, turns = zeros(2, kind=torch.int64), zeros(512, kind=torch.int32)
    exchange = all_reduce.Exchange(addresses, turns, all_reduce.Exchange.room_for(hidden), rank=0)
    for rows_reduced in (64,) if few else (1, 64, 256):
        part = zeros(rows_reduced, hidden)
        all_reduce.all_reduce(part, part.clone(), exchange)
        normed = part.clone(), part.clone(), zeros(hidden), 1e-6
        all_reduce.all_reduce_norm(part, *normed, exchange)
    launch_paged(dtype, dtype, few=few)
    launch_linear(dtype, hidden, few=few)
    launch_experts(dtype, few=few)


def launch_paged(dtype: torch.dtype, kv_dtype: torch.dtype, *, few: bool = False) -> None:
    """What writes and reads pages of `kv_dtype`, at the shape of a Qwen3 layer."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    heads, kv_heads, dim = 16, 8, 128
    index32, indptr = zeros(4, kind=torch.int32), zeros(5, kind=torch.int32)
    table, weight = zeros(9, 64, kind=torch.int32), zeros(dim)
    layer = zeros(2, 8, 16, kv_heads, dim, kind=kv_dtype)
    for tokens in (80,) if few else (4, 80, 800):
        qkv = zeros(tokens, (heads + 2 * kv_heads) * dim)
        where = zeros(tokens, kind=torch.int64)
        angles = zeros(64, dim, kind=torch.float32)
        rope.rope_store(qkv, angles, where, where, layer, weight, weight)
    for count in (3000,) if few else (4, 16, 3000):
        decode.decode_attention(
            zeros(count, heads, dim),
            layer,
            zeros(count, kind=torch.int32),
            zeros(count, kind=torch.int32),
            table,
            1.0,
            decode.DecodeWorkspace(count, heads, kv_heads, dim, torch.device("cpu")),
        )
    launch_prefixes(zeros(4, heads, dim), layer, table)
    decode.rope_decode_attention(
        zeros(4, (heads + 2 * kv_heads) * dim),
        zeros(64, dim, kind=torch.float32),
        layer,
        index32,
        index32.clone(),
        table,
        1.0,
        decode.DecodeWorkspace(4, heads, kv_heads, dim, torch.device("cpu")),
        weight,
        weight,
    )
    for count in () if dtype == torch.float32 else (4,) if few else (4, 3000):
        index = zeros(count, kind=torch.int32)
        decode.rope_decode_attention(
            zeros(count, (heads + 2 * kv_heads) * dim),
            zeros(64, dim, kind=torch.float32),
            layer,
            index,
            index.clone(),
            table,
            1.0,
            decode.DecodeWorkspace(count, heads, kv_heads, dim, torch.device("cpu")),
            quantized=QuantizedRows.by_parts(count, heads * dim, dim, torch.device("cpu")),
        )
    decode.decode_attention(
        zeros(4, heads, dim),
        layer,
        index32,
        index32,
        table,
        1.0,
        decode.DecodeWorkspace(4, heads, kv_heads, dim, torch.device("cpu")),
        tokens=index32,
    )
    for longest in (64,) if few else (16, 64, 4096):
        attention.extend_attention(
            zeros(4, heads, dim), layer, index32[:1], indptr[:2], index32[:1], table, 1.0, longest
        )


def launch_prefixes(q: torch.Tensor, layer: torch.Tensor, table: torch.Tensor) -> None:
    """Decode attention of rows with prefixes in common, as many as `q` has."""
    count, heads, dim = q.shape
    kv_heads = layer.shape[3]

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    tiles = integers(2, decode.tile_rows(heads, kv_heads))
    decode.decode_attention(
        q,
        layer,
        integers(count),
        integers(count),
        table,
        1.0,
        decode.DecodeWorkspace(count, heads, kv_heads, dim, torch.device("cpu")),
        prefixes=decode.SharedPrefixes(tiles, integers(2), integers(count)),
    )


def launch_linear(dtype: torch.dtype, hidden: int, *, few: bool = False) -> None:
    """Every candidate of the tuner; float32 has none but the default `gemv`."""
    one, weight = torch.zeros(1, hidden, dtype=dtype), torch.zeros(2048, hidden, dtype=dtype)
    default_only = few or dtype == torch.float32
    for candidate in GEMV_CANDIDATES[2:3] if default_only else GEMV_CANDIDATES:
        config = candidate.gemv
        silu = config is not None and config.block_k <= 4096  # no gate is as wide as the widest
        gemv.gemv(one, weight, norm=one[0], silu=silu, config=config)
    workspace = skinny.SkinnyWorkspace(torch.device("cpu"))
    many = torch.zeros(16, hidden, dtype=dtype)
    candidates = SKINNY_CANDIDATES[:1] if few else SKINNY_CANDIDATES
    for candidate in candidates if dtype != torch.float32 else ():
        skinny.skinny(many, weight, silu=True, config=candidate.skinny, workspace=workspace)


def launch_experts(dtype: torch.dtype, *, few: bool = False) -> None:
    """Every way of a mixture, one layer of Qwen3-30B-A3B's widths, with fewer experts."""
    experts, hidden, inner = 16, 2048, 768
    places = torch.arange(experts, dtype=torch.int32)
    router = routing.Router(routing.Routing(8, renormalize=True), load=torch.zeros(experts).long())
    held = routing.Router(
        routing.Routing(8, sigmoid=True, groups=4, groups_kept=2, group_top=2), places=places
    )
    for kind in (held,) if few else (router, held):
        weights = moe.ExpertWeights(
            Weight.plain(torch.zeros(experts, 2 * inner, hidden, dtype=dtype)),
            Weight.plain(torch.zeros(experts, hidden, inner, dtype=dtype)),
            kind,
        )
        for tokens in (1, 8192) if few else (1, 64, 8192):
            x, logits = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, experts)
            moe.experts(x, logits, weights, x.clone())
        routing.route_and_sort(torch.zeros(64, experts), kind, experts, 16, counters=64)
    if dtype == torch.bfloat16:
        for activations, blocks in () if few else FLOAT8_KINDS:
            launch_float8_experts(activations, blocks=blocks)
    positions = torch.zeros(8192 * 8, dtype=torch.int32)
    moe.combine(x, positions, torch.zeros(8192, 8), x, x)


def launch_gpt_oss(dtype: torch.dtype) -> None:
    """Attention with sinks, with a window and without, and experts with biases and the clamp, at
    the widths of gpt-oss with fewer experts."""
    heads, kv_heads, dim, cpu = 64, 8, 64, torch.device("cpu")
    layer, table = torch.zeros(2, 8, 16, kv_heads, dim, dtype=dtype), torch.zeros(9, 64).int()
    sinks, chunk = torch.zeros(heads), torch.zeros(2).int()
    for window in (0, 128):
        for count in (4, 3000):
            index = torch.zeros(count).int()
            workspace = decode.DecodeWorkspace(count, heads, kv_heads, dim, cpu)
            where = layer, index, index.clone(), table, 1.0
            q = torch.zeros(count, heads, dim, dtype=dtype)
            qkv = torch.zeros(count, (heads + 2 * kv_heads) * dim, dtype=dtype)
            own = {"window": window, "sinks": sinks}
            decode.decode_attention(q, *where, workspace, **own)
            decode.rope_decode_attention(qkv, torch.zeros(64, dim), *where, workspace, **own)
        attention.extend_attention(
            q, layer, chunk[:1], chunk, chunk[:1], table, 1.0, 4096, window=window, sinks=sinks
        )
    experts, hidden, inner = 4, 2880, 2880
    weights = moe.ExpertWeights(
        Weight.plain(torch.zeros(experts, 2 * inner, hidden, dtype=dtype)),
        Weight.plain(torch.zeros(experts, hidden, inner, dtype=dtype)),
        routing.Router(routing.Routing(4, renormalize=True)),
        torch.zeros(experts, 2 * inner, dtype=dtype),
        torch.zeros(experts, hidden, dtype=dtype),
        ClampedSwiGlu(alpha=1.702, limit=7.0),
    )
    for tokens in (1, 16, 8192):
        x, logits = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, experts)
        moe.experts(x, logits, weights, x.clone())


def float8_experts(
    experts: int, hidden: int, inner: int, activations: Activations, *, blocks: bool
) -> tuple[Weight, Weight]:
    """Of each shape's memory only the addresses count: one expert's is enough."""

    def stack(rows: int, columns: int) -> Weight:
        one = float8_weight(rows, columns, activations, blocks=blocks)
        assert one.scales is not None
        inputs = one.input_scale
        return replace(
            one,
            payload=one.payload.expand(experts, -1, -1),
            scales=one.scales.expand(experts, *one.scales.shape),
            input_scale=None if inputs is None else inputs.expand(experts, 1),
        )

    return stack(2 * inner, hidden), stack(hidden, inner)


def launch_float8_experts(activations: Activations, *, blocks: bool) -> None:
    stacks = float8_experts(4, 2048, 768, activations, blocks=blocks)
    weights = moe.ExpertWeights(*stacks, routing.Router(routing.Routing(2)))
    for tokens in (1, 16, 1024):
        x, logits = torch.zeros(tokens, 2048, dtype=torch.bfloat16), torch.zeros(tokens, 4)
        choice = moe.default_choice(tokens, weights)
        x, rows = moe.norm_for_experts(x, x[0], 1e-6, weights, choice, x.clone())
        moe.experts(x, logits, weights, x.clone(), rows=rows, choice=choice)


def float8_weight(rows: int, columns: int, activations: Activations, *, blocks: bool) -> Weight:
    shape = (-(-rows // 128), -(-columns // 128)) if blocks else (rows,)
    return Weight(
        torch.empty(rows, columns, dtype=FLOAT8),
        torch.bfloat16,
        scales=torch.ones(shape),
        block=(128, 128) if blocks else None,
        activations=activations,
        activation_bound=1.0 if activations == Activations.TOKEN else None,
        input_scale=torch.ones(1) if activations == Activations.STATIC else None,
    )


FLOAT8_KINDS = (
    (Activations.STATIC, False),
    (Activations.TOKEN, False),
    (Activations.GROUP, True),
    (Activations.KEPT, False),
    (Activations.KEPT, True),
)


def launch_float8(hidden: int, *, few: bool = False) -> None:
    """Products of float8 weights of every kind, and what quantizes their inputs."""
    scratch = Scratch(torch.device("cpu"))
    for activations, blocks in FLOAT8_KINDS[2:3] if few else FLOAT8_KINDS:
        weight = float8_weight(2048, hidden, activations, blocks=blocks)
        gate_up = {"norm": torch.zeros(hidden, dtype=torch.bfloat16), "silu": True}
        for choice, tokens in ((GEMV_CANDIDATES[2], 1), (SKINNY_CANDIDATES[2], 16)):
            x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
            multiply_quantized(x, weight, choice=choice, scratch=scratch, **gate_up)
            feed(x, weight, weight, choice=choice, scratch=scratch, norm=gate_up["norm"])
            if activations != Activations.STATIC:
                continue  # the other ending has nothing of the weight's kind
            residual = torch.zeros(tokens, 2048, dtype=torch.bfloat16)
            multiply_quantized(x, weight, choice=choice, scratch=scratch, residual=residual)
        if activations != Activations.KEPT:
            x = torch.zeros(4, hidden, dtype=torch.bfloat16)
            quantize.quantize(x, weight, norm=x[0], residual=x.clone())


def launch_int8(hidden: int, *, few: bool = False) -> None:
    """Products of int8 weights at every tile, and what quantizes their inputs; `few`: at one."""
    weight = Weight(
        torch.empty(2048, hidden, dtype=torch.int8),
        torch.bfloat16,
        scales=torch.ones(2048),
        activations=Activations.TOKEN,
        input_dtype=torch.int8,
    )
    x = torch.zeros(4, hidden, dtype=torch.bfloat16)
    int8.quantize_int8(x, weight, norm=x[0], residual=x.clone())
    int8.quantize_int8(torch.zeros(4, 2 * hidden, dtype=torch.bfloat16), weight, silu=True)
    for tokens in (32,) if few else (1, 32, 256, 8192):
        values = torch.zeros(tokens, hidden, dtype=torch.int8)
        residual = torch.zeros(tokens, 2048, dtype=torch.bfloat16)
        int8.int8_product(values, torch.ones(tokens, 1), weight, residual=residual)
    scratch = Scratch(torch.device("cpu"))
    for choice, tokens in ((GEMV_CANDIDATES[2], 1), (SKINNY_CANDIDATES[2], 16)):
        few = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        multiply_quantized(few, weight, choice=choice, scratch=scratch, norm=x[0], silu=True)


def launch_expert_candidates(experts: int, top_k: int, hidden: int, inner: int) -> None:
    """All that is timed, and routing and sorting, of bf16 and float8; see `float8_experts`."""

    def shaped(*shape: int) -> Weight:
        return Weight.plain(torch.zeros(1, dtype=torch.bfloat16).expand(shape))

    router = routing.Router(routing.Routing(top_k, renormalize=True))
    plain = shaped(experts, 2 * inner, hidden), shaped(experts, hidden, inner)
    launch_candidates(moe.ExpertWeights(*plain, router), experts)
    for activations, blocks in (Activations.TOKEN, False), (Activations.GROUP, True):
        stacks = float8_experts(experts, hidden, inner, activations, blocks=blocks)
        launch_candidates(moe.ExpertWeights(*stacks, router), experts)


def launch_candidates(weights: moe.ExpertWeights, experts: int) -> None:
    hidden = weights.gate_up.shape[1]
    for tokens in (1, 16, 64, 256, 1024, 8192):
        x, logits = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, experts)
        for choice in moe_tuning.candidates(tokens, weights):
            if choice != moe.GROUPED:
                moe.experts(x, logits, weights, x, choice=choice)


def launch_products(hidden: int, inner: int, qkv: int, attended: int, vocab: int) -> None:
    """Our kernels for a decoder layer and the head, at the token counts that have some."""

    def projection(rows: int, columns: int, **options: bool) -> Projection:
        weight = Weight.plain(torch.empty(rows, columns, dtype=torch.bfloat16))
        return Projection([weight], **options)

    def float8_projection(rows: int, columns: int, *, blocks: bool, **options: Any) -> Projection:
        kind = Activations.GROUP if blocks else Activations.TOKEN
        return Projection([float8_weight(rows, columns, kind, blocks=blocks)], **options)

    layer = [
        projection(qkv, hidden),
        projection(hidden, attended, residual=True),
        projection(2 * inner, hidden, silu=True),
        projection(hidden, inner, residual=True),
        projection(vocab, hidden, every_token=False, wide=True),
    ]
    for blocks in (False, True):
        down = float8_projection(hidden, inner, blocks=blocks, residual=True)
        layer += [
            float8_projection(qkv, hidden, blocks=blocks),
            float8_projection(hidden, attended, blocks=blocks, residual=True),
            float8_projection(2 * inner, hidden, blocks=blocks, silu=True, feeds=down.weights[0]),
            down,
        ]
    chip = SimpleNamespace(multi_processor_count=multiprocessors(torch.device("cpu")))
    setattr(torch.cuda, "get_device_properties", lambda device: chip)  # noqa: B010
    scratch = Scratch(torch.device("cpu"))
    for tokens in (1, 16, 32, 64, 128):
        for kind in layer:
            x = torch.zeros(tokens, kind.weights[0].shape[1], dtype=torch.bfloat16)
            target = torch.zeros(tokens, kind.outputs, dtype=kind.result_dtype)
            options: dict[str, Any] = {"norm": x[0], "silu": kind.silu}
            if kind.wide:
                options["out"] = target
            if kind.residual:
                options = {"residual": target}
            weight = kind.weights[0]
            for choice in own_candidates(tokens, kind, scratch):
                if kind.feeds is not None:
                    where: dict[str, Any] = {"choice": choice, "scratch": scratch}
                    feed(x, weight, kind.feeds, norm=x[0], **where)
                    continue
                product = multiply_quantized if weight.quantized else multiply
                product(x, weight, choice=choice, scratch=scratch, **options)


def launch_decode(heads: int, kv_heads: int, dim: int, *, norm: bool) -> None:
    """Decode attention that begins with RoPE, in every form that the number of rows chooses."""

    def zeros(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    table = zeros(9, 64, kind=torch.int32)
    for count in (4, 64, 256):
        index = zeros(count, kind=torch.int32)
        decode.rope_decode_attention(
            zeros(count, (heads + 2 * kv_heads) * dim),
            zeros(64, dim, kind=torch.float32),
            zeros(2, 8, 16, kv_heads, dim),
            index,
            index.clone(),
            table,
            1.0,
            decode.DecodeWorkspace(count, heads, kv_heads, dim, torch.device("cpu")),
            *(zeros(2, dim).unbind() if norm else ()),
        )
        launch_prefixes(zeros(count, heads, dim), zeros(2, 8, 16, kv_heads, dim), table)


def launch_sampling() -> None:
    logits, one = torch.zeros(4, 151936), torch.zeros(4)
    index32, index64 = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    for kind in (torch.bfloat16, torch.float32):
        sample.argmax(logits.to(kind))
        sample.sample(logits.to(kind), one, index64, index64)
        sample.sample(logits.to(kind), one, index64, index64, one)
        top_k_top_p.sampling_thresholds(logits.to(kind), one, index32, one, one)
    # As a decode step calls them.
    floats, integers = torch.zeros(9, 6), torch.zeros(9, 4, dtype=torch.int64)
    known = torch.zeros(9, 64, dtype=torch.int32)
    history = sample.History(known[:, 0].contiguous(), known, 8)
    where: dict[str, Any] = {"rows": index64, "history": history, "out": index64.clone()}
    sample.argmax(logits, **where)
    peers = torch.zeros(2, dtype=torch.int64)
    shard = sample.VocabShard(75968, peers, index32, rank=1)
    sample.argmax(logits, **where, shard=shard)
    sample.sample(logits, one, index64, index64, shard=shard)
    token_mail.post(index64, index64, peers, 8, 1)
    token_mail.take(index64, 4, 8, 1, history)
    least = top_k_top_p.sampling_thresholds(
        logits, floats[:, 0], integers[:, 1], floats[:, 1], floats[:, 2], rows=index64
    )
    for filtered in (None, least):
        columns = (floats[:, 0], integers[:, 0], history.lens)
        sample.sample(logits, *columns, filtered, **where)
    counts = torch.zeros(4, 151936, dtype=torch.int32)
    penalties.penalize(logits, index32, counts, one, one, one)
    for kind in (torch.bfloat16, torch.float32):
        bitmask.mask_tokens(logits.to(kind), counts[:, :4748], index64)


def launch_smallest() -> None:
    """Sizes of one, which the compiler takes for constants."""
    one, index = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    for silu in (False, True):
        weight = torch.zeros(2 if silu else 1, 8)
        gemv.gemv(torch.zeros(1, 8), weight, silu=silu)
        skinny.skinny(torch.zeros(1, 8), weight, silu=silu)
    norm.rms_norm(one, one[0], 1.0)
    activation.silu_and_mul(torch.zeros(1, 2))
    gather.embed(one, index)
    sample.sample(one, one[0], index, index)
    top_k_top_p.sampling_thresholds(one, one[0], index.int(), one[0], one[0])
    penalties.penalize(one, index.int(), one.int(), one[0], one[0], one[0])
    bitmask.mask_tokens(one, one.int(), index)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    compile_only()
    if sys.argv[1:] == ["decode"]:
        launch_decode(16, 8, 128, norm=True)  # Qwen3-0.6B
        launch_decode(32, 8, 128, norm=False)  # Llama-3.1-8B
    elif sys.argv[1:] == ["experts"]:
        launch_expert_candidates(128, 8, 2048, 768)  # Qwen3-30B-A3B
        launch_expert_candidates(8, 2, 4096, 14336)  # Mixtral-8x7B
    elif sys.argv[1:] == ["products"]:
        launch_products(1024, 3072, 4096, 2048, 151936)  # Qwen3-0.6B
        launch_products(4096, 14336, 6144, 4096, 128256)  # Llama-3.1-8B
    elif sys.argv[1:] == ["float32"]:
        launch_all(torch.float32)
        launch_gpt_oss(torch.float32)
        launch_paged(torch.float32, FLOAT8)
    elif sys.argv[1:] == ["bfloat16"]:
        launch_all(torch.bfloat16)
        launch_gpt_oss(torch.bfloat16)
        launch_paged(torch.bfloat16, FLOAT8)
        launch_float8(4096)
        launch_int8(4096)
        launch_sampling()
        launch_smallest()
    else:
        launch_all(torch.bfloat16, few=True)
        launch_paged(torch.bfloat16, FLOAT8, few=True)
        launch_float8(4096, few=True)
        launch_int8(4096, few=True)
        launch_sampling()
