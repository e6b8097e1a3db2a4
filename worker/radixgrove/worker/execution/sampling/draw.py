"""From (edited) logits to one token a row: kernels on CUDA, shortcuts over few candidates on a CPU.

Both draw the exponential race of `radixgrove.kernels.random`, so a row's token depends on its
logits, seed and position alone. Filters apply in the order top-k, top-p (of what top-k left), min-p
(relative to the most probable token), all after the temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels import random, sample, top_k_top_p
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable

# Candidates the CPU's filters look at before they fall back on sorting the whole vocabulary.
_CANDIDATES = 512


def draw_by_kernels(
    logits: Tensor,
    rows: Tensor,
    state: SamplingState,
    table: RequestTable,
    need: int,
    out: Tensor | None,
    shard: sample.VocabShard | None = None,
) -> Tensor:
    """One token a row, added to the table: two kernels, three with filters, which read what they
    need of each row where it stands.

    Args:
        logits: [S, V], the model's dtype or float32.
        rows: [S] int64, distinct but for the table's dummy row.
        need: union over the rows; only `RANDOM` and `FILTER` count.
        out: [S] int64, where to write; allocated when None.
        shard: what part of the vocabulary `logits` are of, without `FILTER`; None: all of it.

    Returns:
        [S] int64.
    """
    history = table.history
    if not need & SamplingFeatures.RANDOM:
        return sample.argmax(logits, rows=rows, history=history, out=out, shard=shard)
    temperature = state.column("temperature")
    least = None
    if need & SamplingFeatures.FILTER:
        filters = (state.column(name) for name in ("top_k", "top_p", "min_p"))
        least = top_k_top_p.sampling_thresholds(logits, temperature, *filters, rows=rows)
    return sample.sample(
        logits,
        temperature,
        state.column("seed"),
        table.lens,
        least,
        rows=rows,
        history=history,
        out=out,
        shard=shard,
    )


def draw(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, need: int
) -> Tensor:
    """One token an item, on a CPU; on CUDA where rows have several.

    Args:
        logits: [S, V], the model's dtype or float32.
        rows: [S] int64, for their parameters.
        positions: [S] integers, the position each sampled token will have.
        need: union over the rows; only `RANDOM` and `FILTER` count.

    Returns:
        [S] int64.
    """
    if not need & SamplingFeatures.RANDOM:
        return logits.max(-1).indices  # on a CPU `argmax` is several times slower in bfloat16
    floats, integers = state.floats(rows), state.integers(rows)
    temperature, seed = floats["temperature"], integers["seed"]
    if not need & SamplingFeatures.FILTER:
        race = sample.sample if logits.is_cuda else sample.sample_reference
        return race(logits, temperature, seed, positions)
    filters = (integers["top_k"].int(), floats["top_p"], floats["min_p"])
    if logits.is_cuda:
        least = top_k_top_p.sampling_thresholds(logits, temperature, *filters)
        return sample.sample(logits, temperature, seed, positions, least)
    return _draw_few(logits.float(), temperature, seed, positions, *filters)


def _draw_few(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Filter and race among the best `_CANDIDATES` when they hold all that can survive."""
    vocab = logits.shape[1]
    values, ids = logits.topk(min(_CANDIDATES, vocab))
    greedy = temperature == 0
    scale = 1.0 / temperature.clamp(min=1e-6)
    best = values[:, :1]
    weights = ((values - best) * scale[:, None]).exp()
    mass = ((logits - best) * scale[:, None]).exp_().sum(-1)
    k = torch.where(top_k > 0, top_k, vocab)
    limited = k <= values.shape[1]  # top-k alone leaves candidates only
    ranks = torch.arange(values.shape[1])
    mass = torch.where(limited, (weights * (ranks < k[:, None])).sum(-1), mass)
    cumulative = weights.cumsum(-1)
    reaches = cumulative[:, -1] >= top_p * mass
    # Past the candidates `mass` is that of the whole vocabulary: right only when top-k is off.
    by_mass = (k >= vocab) & (((top_p < 1.0) & reaches) | (weights[:, -1] < min_p))
    complete = greedy | limited | by_mass | (values.shape[1] == vocab)
    if not bool(complete.all()):
        least = top_k_top_p.sampling_thresholds_reference(logits, temperature, top_k, top_p, min_p)
        return sample.sample_reference(logits, temperature, seed, positions, least)
    threshold = values.gather(1, k.clamp(max=values.shape[1]).long()[:, None] - 1)
    nucleus_end = (cumulative >= (top_p * mass)[:, None]).int().argmax(-1, keepdim=True)
    nucleus = torch.maximum(threshold, values.gather(1, nucleus_end))
    threshold = torch.where(((top_p < 1.0) & reaches)[:, None], nucleus, threshold)
    dropped = (values < threshold) | (weights < min_p[:, None])
    scores = values / torch.where(greedy, 1.0, temperature)[:, None]
    scores -= random.exponential(seed, positions, ids).log_()
    scores.masked_fill_(dropped, float("-inf"))
    winner = torch.where(greedy, 0, scores.argmax(-1))
    return ids.gather(1, winner[:, None]).squeeze(1)
