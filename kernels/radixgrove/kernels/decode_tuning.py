"""How decode attention is cut up: measured on the engine's own pool while it warms up."""

from __future__ import annotations

import logging
import random
from functools import partial

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv
from radixgrove.kernels.attention import DecodeConfig, DecodeWorkspace, decode_attention
from radixgrove.kernels.tuning import milliseconds

log = logging.getLogger(__name__)

DECODE_CANDIDATES = (
    DecodeConfig(block_n=64, stages=3, warps=4, programs=3),
    DecodeConfig(block_n=64, stages=2, warps=2, programs=4),
    DecodeConfig(block_n=32, stages=4, warps=4, programs=3),
    DecodeConfig(block_n=32, stages=3, warps=2, programs=4),
    DecodeConfig(block_n=16, stages=4, warps=1, programs=10),
    DecodeConfig(block_n=16, stages=4, warps=1, programs=6, least=2, merge=4),
)
_CONTEXT = 640  # mean KV tokens of a row


def tune_decode(
    pool: Tensor, num_heads: int, workspace: DecodeWorkspace
) -> dict[int, DecodeConfig]:
    """The fastest way by batch size, over rows of unequal length.

    Args:
        pool: [layers, 2, num_pages, page_size, KV, D]; its content does not matter and stays.

    Returns:
        For some batch sizes up to the workspace's, the best configuration; a batch takes the next
        larger one's. Nothing off CUDA, in float32, or of sizes for which the pool is too small.
    """
    if not pool.is_cuda or pool.dtype == torch.float32:
        return {}
    num_pages, page_size = pool.shape[2:4]
    sizes = {1, 8, 32, 64, 128, workspace.max_batch}
    return {
        batch: _fastest(pool, num_heads, workspace, batch)
        for batch in sorted(sizes)
        if batch <= workspace.max_batch and batch * cdiv(2 * _CONTEXT, page_size) <= num_pages
    }


def _fastest(pool: Tensor, num_heads: int, workspace: DecodeWorkspace, batch: int) -> DecodeConfig:
    num_pages, page_size = pool.shape[2:4]
    device = pool.device
    rng = random.Random(0)
    lengths = [rng.randrange(_CONTEXT // 4, 7 * _CONTEXT // 4) for _ in range(batch)]
    if batch == 1:
        lengths = [_CONTEXT]
    q = torch.randn(batch, num_heads, pool.shape[-1], device=device).to(pool.dtype)
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = cdiv(max(lengths), page_size)
    order = torch.randperm(num_pages, device=device)[: batch * pages].int().view(batch, pages)
    layers = pool[: max(1, 256 // batch)]  # more than the L2 cache holds

    def run(config: DecodeConfig) -> None:
        for layer in layers:
            decode_attention(q, layer, rows, lens, order, 1.0, workspace, config=config)

    best, best_time = DecodeConfig(), float("inf")
    for candidate in DECODE_CANDIDATES:
        try:
            elapsed = milliseconds(partial(run, candidate), device)
        except Exception:  # a config that this device or Triton cannot build is just not chosen
            log.debug("decode candidate %s failed", candidate, exc_info=True)
            continue
        if elapsed < best_time:
            best, best_time = candidate, elapsed
    return best
