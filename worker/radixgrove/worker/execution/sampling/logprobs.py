"""Log-probabilities of the model's own distribution: before temperature, penalties and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.worker.messages import TokenLogprobs


@dataclass(slots=True)
class LogprobTensors:
    """Of N tokens: their own log-probabilities and the best K alternatives'."""

    chosen: Tensor  # [N] float32
    top_ids: Tensor  # [N, K] int64, most probable first
    top: Tensor  # [N, K] float32

    def to_host(self) -> LogprobTensors:
        """Copies in pinned memory on CUDA, ready once the current stream reaches this point."""
        if not self.chosen.is_cuda:
            return self
        return LogprobTensors(*(_pinned(x) for x in (self.chosen, self.top_ids, self.top)))

    def entries(self, widths: list[int]) -> list[TokenLogprobs]:
        """For people: `widths` says how many alternatives each token asked for."""
        chosen, ids, top = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        return [
            TokenLogprobs(chosen[i], list(zip(ids[i][:width], top[i][:width], strict=True)))
            for i, width in enumerate(widths)
        ]


def _pinned(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def token_logprobs(logits: Tensor, tokens: Tensor, width: int) -> LogprobTensors:
    """Of `tokens` [N] int64 under `logits` [N, V]; `width` alternatives, possibly 0.

    A token without a logit has the log-probability -inf.
    """
    logprobs = logits.float().log_softmax(-1)
    top, ids = logprobs.topk(width)
    known = tokens.clamp(0, logits.shape[1] - 1)
    chosen = logprobs.gather(1, known[:, None]).squeeze(1)
    return LogprobTensors(chosen.masked_fill_(known != tokens, float("-inf")), ids, top)
