"""What models, samplers and attention call: Triton kernels on CUDA, torch references elsewhere.

A decoder layer over the residual stream `h` [T, hidden], with one rank:

    qkv = ops.linear(h, w_qkv, b_qkv, norm=w_input_norm, eps=eps)
    q = ops.rope_store(qkv, cos_sin, positions, slots, pool[layer], w_q_norm, w_k_norm, eps)
    a = backend.attend(layer, q, kv)                  # K and V are in the pages already
    ops.linear(a.flatten(1), w_o, residual=h)         # h += ..., in place
    g = ops.feed(h, w_gate_up, w_down, norm=w_post_norm, eps=eps)
    ops.linear(g, w_down, residual=h)

Where `ops.defers_residual` says so, the addition is cheaper in the norm after it:
`y = ops.linear(a, w_o)`, and `ops.add_rms_norm(y, h, w_post_norm, eps)` makes the next product's
input, which `ops.linear` then takes without `norm`. Logits:
`ops.linear(ops.embed(h, last), w_head, norm=...)`.
"""

from __future__ import annotations

from torch import Tensor

from radixgrove.kernels import activation, bitmask, gather, moe, norm, pages, penalties, rope
from radixgrove.kernels import decode_inputs as _rows
from radixgrove.kernels import linear as _linear
from radixgrove.kernels import scaled as _scaled
from radixgrove.kernels.autotune import LinearTuner
from radixgrove.kernels.matmul import multiply
from radixgrove.kernels.moe_tuning import ExpertTuner
from radixgrove.kernels.penalties import PROMPT_BIT
from radixgrove.kernels.weight import QuantizedRows, Weight

__all__ = [
    "PROMPT_BIT",
    "add_rms_norm",
    "defers_residual",
    "embed",
    "expert_tuner",
    "experts",
    "feed",
    "gather_pages",
    "gather_rows",
    "kv_indices",
    "linear",
    "mask_tokens",
    "norm_for_experts",
    "penalize",
    "rms_norm",
    "room_for_heads",
    "rope_store",
    "scatter_pages",
    "silu_and_mul",
    "tuner",
]

# Filled by `tuner.tune(...)` while an engine warms up; untuned shapes take the defaults.
tuner = LinearTuner()
expert_tuner = ExpertTuner()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, hidden] -> [T, hidden]; see `norm.rms_norm`."""
    if x.is_cuda:
        return norm.rms_norm(x, weight, eps)
    return norm.rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x`, then its RMSNorm; see `norm.add_rms_norm`."""
    if x.is_cuda:
        return norm.add_rms_norm(x, residual, weight, eps)
    return norm.add_rms_norm_reference(x, residual, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * inner] -> [T, inner]; see `activation.silu_and_mul`."""
    if gate_up.is_cuda:
        return activation.silu_and_mul(gate_up)
    return activation.silu_and_mul_reference(gate_up)


def rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer_pages: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Fused QKV -> rotated q, with K and V stored into the layer's pages; see `rope.rope_store`."""
    function = rope.rope_store if qkv.is_cuda else rope.rope_store_reference
    return function(qkv, cos_sin, positions, slots, layer_pages, q_norm, k_norm, eps)


def linear(
    x: Tensor | QuantizedRows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    added_to: Tensor | None = None,
) -> Tensor:
    """`residual += silu_and_mul(rms_norm(x) @ weight.T + bias)`, each part optional.

    What comes before a product with a quantized weight is in the kernel that quantizes x.

    Args:
        x: [T, K] contiguous, or quantized for `weight`, without a norm then. weight: [N, K], or
            [2 N, K] with `silu`. bias: [N].
        norm, eps: weight [K] and epsilon of an RMSNorm applied to x first.
        silu: SiLU-and-multiply the two halves of the product; excludes `bias`.
        residual: [T, N] contiguous, updated in place and returned.
        out: [T, N] contiguous, where to write a product without any ending; x's dtype or float32.
        added_to: [T, K] contiguous, to which x is added before the norm, in place.

    Returns:
        [T, N], x's dtype or that of `out`.
    """
    if isinstance(x, Tensor) and not x.is_cuda:
        if added_to is not None:
            x = added_to.add_(x)
        return _linear.linear_reference(
            x, weight, bias, norm=norm, eps=eps, silu=silu, residual=residual, out=out
        )
    choice = tuner.choose(x.shape[0], weight, silu=silu)
    if weight.quantized:
        return _scaled.multiply_quantized(
            x,
            weight,
            bias,
            choice=choice,
            scratch=tuner.scratch(weight.device),
            norm=norm,
            eps=eps,
            added_to=added_to,
            silu=silu,
            residual=residual,
            out=out,
        )
    assert isinstance(x, Tensor), "only a quantized weight takes quantized inputs"
    if added_to is not None:
        assert norm is not None
        x, norm = add_rms_norm(x, added_to, norm, eps), None
    return multiply(
        x,
        weight,
        bias,
        choice=choice,
        scratch=tuner.scratch(x.device),
        norm=norm,
        eps=eps,
        silu=silu,
        residual=residual,
        out=out,
    )


def feed(
    x: Tensor,
    weight: Weight,
    feeds: Weight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    added_to: Tensor | None = None,
) -> Tensor | QuantizedRows:
    """SiLU-and-multiply the halves of `rms_norm(x) @ weight.T + bias`, for a product with `feeds`:
    quantized where that takes it so.

    Args:
        x: [T, K] contiguous. weight: [2 N, K], gate first. bias: [2 N].
        norm, eps, added_to: as of `linear`.

    Returns:
        [T, N].
    """
    if not x.is_cuda:
        if added_to is not None:
            x = added_to.add_(x)
        y = _linear.linear_reference(x, weight, bias, norm=norm, eps=eps)
        return activation.silu_and_mul_reference(y)
    return _scaled.feed(
        x,
        weight,
        feeds,
        bias,
        choice=tuner.choose(x.shape[0], weight, silu=bias is None),
        scratch=tuner.scratch(x.device),
        norm=norm,
        eps=eps,
        added_to=added_to,
    )


def room_for_heads(tokens: int, weight: Weight, head_dim: int) -> QuantizedRows | None:
    """Where attention is to leave its result, [T, heads * D], quantized for the product with
    `weight`, each head with a scale; None: it is not."""
    if weight.device.type != "cuda" or not _scaled.takes_quantized(tokens, weight):
        return None
    if not _scaled.takes_heads(weight, head_dim):
        return None
    return QuantizedRows.by_parts(tokens, weight.shape[1], head_dim, weight.device)


def norm_for_experts(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: moe.ExpertWeights,
    count: int,
    added_to: Tensor | None = None,
) -> tuple[Tensor, QuantizedRows | None]:
    """[T, K] -> its norm, and that quantized where `experts` wants it, of which there are `count`
    on all ranks; see `moe.norm_for_experts`."""
    if not x.is_cuda:
        if added_to is not None:
            x = added_to.add_(x)
        return norm.rms_norm_reference(x, norm_weight, eps), None
    choice = expert_tuner.choose(x.shape[0], count, weights)
    return moe.norm_for_experts(x, norm_weight, eps, weights, choice, added_to)


def experts(
    x: Tensor,
    logits: Tensor,
    weights: moe.ExpertWeights,
    residual: Tensor | None = None,
    rows: QuantizedRows | None = None,
) -> Tensor:
    """`residual +=` what each token's experts make of x; see `moe.experts`."""
    if not x.is_cuda:
        return moe.experts_reference(x, logits, weights, residual)
    choice = expert_tuner.choose(x.shape[0], logits.shape[1], weights)
    return moe.experts(x, logits, weights, residual, rows=rows, choice=choice)


def defers_residual(tokens: int, weight: Weight) -> bool:
    """Whether `linear` for so many tokens is better called without its residual, and the product
    added to that by the norm after it."""
    return weight.device.type == "cuda" and tuner.choose(tokens, weight, silu=False).deferred


def embed(weight: Tensor, token_ids: Tensor, first: int = 0) -> Tensor:
    """Rows of a table by id, zeros outside this shard; see `gather.embed`."""
    if weight.is_cuda:
        return gather.embed(weight, token_ids, first)
    return gather.embed_reference(weight, token_ids, first)


def gather_pages(pool: Tensor, page_ids: Tensor, out: Tensor) -> None:
    """Device pages into page-first layout; see `pages.gather_pages`."""
    function = pages.gather_pages if pool.is_cuda else pages.gather_pages_reference
    function(pool, page_ids, out)


def scatter_pages(pool: Tensor, page_ids: Tensor, source: Tensor) -> None:
    """Page-first pages into the device pool; see `pages.scatter_pages`."""
    function = pages.scatter_pages if pool.is_cuda else pages.scatter_pages_reference
    function(pool, page_ids, source)


def gather_rows(
    rows: Tensor,
    lens: Tensor,
    tokens: Tensor,
    pages: Tensor,
    page_size: int,
    rows32: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    embedding: Tensor | None = None,
    hidden: Tensor | None = None,
    window_pages: Tensor | None = None,
    window_slots: Tensor | None = None,
) -> None:
    """A decode step's inputs from the request table; see `decode_inputs.gather_rows`."""
    function = _rows.gather_rows if rows.is_cuda else _rows.gather_rows_reference
    function(
        rows,
        lens,
        tokens,
        pages,
        page_size,
        rows32,
        kv_lens,
        positions,
        token_ids,
        slots,
        embedding,
        hidden,
        window_pages,
        window_slots,
    )


def kv_indices(
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    indptr: Tensor,
    out: Tensor,
    last_page_len: Tensor,
) -> None:
    """Flat page lists of a batch, on its device; see `pages.kv_indices`."""
    function = pages.kv_indices if rows.is_cuda else pages.kv_indices_reference
    function(rows, kv_lens, page_table, page_size, indptr, out, last_page_len)


def penalize(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply penalties to float32 logits in place; see `penalties.penalize`."""
    function = penalties.penalize if logits.is_cuda else penalties.penalize_reference
    function(logits, rows, counts, repetition, presence, frequency)


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Logits of tokens that may not come to -inf, in place; see `bitmask.mask_tokens`."""
    function = bitmask.mask_tokens if logits.is_cuda else bitmask.mask_tokens_reference
    function(logits, masks, rows)
