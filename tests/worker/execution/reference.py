"""What transformers computes, in the same dtype on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_BATCH = 25


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@torch.inference_mode()
def greedy(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of exactly `max_tokens`; prompts of similar length share a batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), _BATCH):
        members = order[begin : begin + _BATCH]
        longest = max(len(prompts[i]) for i in members)
        padding = [longest - len(prompts[i]) for i in members]
        out = model.generate(
            torch.tensor(
                [[0] * n + list(prompts[i]) for n, i in zip(padding, members, strict=True)]
            ),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        for i, tokens in zip(members, out[:, longest:].tolist(), strict=True):
            results[i] = tokens
    return results


@torch.inference_mode()
def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after each position, [len(tokens), vocab] float32."""
    logits = model(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), -1)


def says(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether `answer` is the model's own greedy continuation: each token its choice after those
    before. One forward decides it.
    """
    choices = logprobs(model, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1)
    return choices.tolist() == list(answer)
