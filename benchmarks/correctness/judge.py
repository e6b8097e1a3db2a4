"""What transformers says of a text, verdicts by that, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.correctness.subject import Generated

BATCH = 25  # texts a forward pass of the reference
# Between logits of experts in float32, which differ by up to 1.6e-6 with the batch.
ROUTER_TIE = 3e-6
_ROUTER_TIES = 2  # texts that may go on otherwise for it; a half of one is to be expected of 50


class Report:
    """Rows of the table; remembers whether anything failed."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, what: str, passed: bool, detail: str, **record: Any) -> None:
        """`what` begins with the model's name."""
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'}  {what:<58}  {detail}", flush=True)
        results.record(
            {
                "benchmark": "correctness",
                "workload": what,
                "model": what.partition(" ")[0],
                "subject": "radixgrove",
                "metric": "passed",
                "value": passed,
                "unit": "1",
                "detail": detail,
                **record,
            }
        )

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """An exception fails this check and lets the next one run."""
        try:
            yield
        except Exception as error:
            self.check(what, False, f"{type(error).__name__}: {error}"[:300])


class Reference:
    """transformers' model of a directory."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def logprobs(self, texts: list[list[int]]) -> Iterator[Tensor]:
        """Of each text [n, V] float32: row i is the distribution of token i + 1.

        Texts are padded on the right, which a causal model's earlier positions do not see.
        """
        for begin in range(0, len(texts), BATCH):
            batch = texts[begin : begin + BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
            logits: Tensor = self._model(ids.to(self._device)).logits
            for row, text in zip(logits, batch, strict=True):
                yield row[: len(text)].float().log_softmax(-1)

    @torch.inference_mode()
    def router_logits(self, text: list[int]) -> tuple[Tensor, ...]:
        """Of each layer with experts, [n, experts]."""
        ids = torch.tensor([text], device=self._device)
        found: tuple[Tensor, ...] = self._model(ids, output_router_logits=True).router_logits
        return found

    def router_margin(self, text: list[int]) -> float:
        """The least difference, over layers and tokens, of the logits of the last expert that a
        token goes to and of the next one; infinite without experts."""
        chosen = getattr(self._model.config, "num_experts_per_tok", None)
        if not chosen:
            return math.inf
        best = [own.float().topk(chosen + 1, -1).values for own in self.router_logits(text)]
        return min((own[:, -2] - own[:, -1]).min().item() for own in best)

    @torch.inference_mode()
    def rescoring_kl(self, texts: list[list[int]], decoded: int) -> float:
        """`check_rescoring` of transformers itself: the last `decoded` tokens of texts of one
        length, once token by token from its KV cache and once in one pass."""
        ids = torch.tensor(texts, device=self._device)
        prefilled = ids.shape[1] - decoded
        out = self._model(ids[:, :prefilled], use_cache=True)
        rows = [out.logits[:, -1]]
        for at in range(prefilled, ids.shape[1] - 1):
            out = self._model(
                ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True
            )
            rows.append(out.logits[:, -1])
        targets = ids[:, prefilled:, None]
        decode = torch.stack(rows, 1).float().log_softmax(-1).gather(2, targets)
        whole = self._model(ids).logits[:, prefilled - 1 : -1].float().log_softmax(-1)
        return kl_estimate(whole.gather(2, targets) - decode)


def kl_estimate(log_ratio: Tensor) -> float:
    """KL from samples: the mean of r - 1 - log r (Schulman 2020)."""
    return (log_ratio.exp() - 1 - log_ratio).mean().item()


@dataclass
class Judge:
    """A model's references in float32 and bfloat16, and verdicts on greedy texts seen before."""

    exact: Reference
    rounded: Reference
    tie: float
    _gaps: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    _own_kl: float | None = None

    @classmethod
    def of(cls, model_dir: Path, tie: float) -> Judge:
        return cls(Reference(model_dir, torch.float32), Reference(model_dir, torch.bfloat16), tie)

    def own_kl(self, texts: list[list[int]], decoded: int) -> float:
        """`Reference.rescoring_kl` in bfloat16, of the first texts asked about: it is slow.

        The longest of them are cut to one length: a short context fits a block of attention's keys,
        and is attended to alike either way.
        """
        if self._own_kl is None:
            longest = sorted(texts, key=len)[-BATCH:]
            cut = [text[-len(longest[0]) :] for text in longest]
            self._own_kl = self.rounded.rescoring_kl(cut, decoded)
        return self._own_kl

    def disagreement(self, prompts: list[list[int]], out: list[Generated]) -> tuple[str, int]:
        """The first token that is not transformers' choice, if any, and the number of ties.

        Where experts of a text so far are a tie, which rounding decides, it may go on otherwise; of
        more than two texts that is no excuse.
        """
        texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
        self._judge(prompts, texts)
        ties = excused = 0
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            for at, gap in enumerate(self._gaps[tuple(text)]):
                if gap > self.tie:
                    margin = self.exact.router_margin(text[: len(prompt) + at])
                    if margin < ROUTER_TIE and excused < _ROUTER_TIES:
                        excused += 1
                        break
                    what = f"differs at token {at}, {gap:.2e} below the best"
                    return f"prompt {index} {what}; experts {margin:.1e} apart", ties
                ties += gap > 0
        return "", ties + excused

    def _judge(self, prompts: list[list[int]], texts: list[list[int]]) -> None:
        """How far each generated token is below transformers' best one, for texts not seen yet."""
        new = [(p, t) for p, t in zip(prompts, texts, strict=True) if tuple(t) not in self._gaps]
        rows = self.exact.logprobs([text for _, text in new])
        for (prompt, text), row in zip(new, rows, strict=True):
            logprobs = row[len(prompt) - 1 : -1]
            ours = torch.tensor(text[len(prompt) :], device=row.device)[:, None]
            gaps = logprobs.amax(-1) - logprobs.gather(1, ours)[:, 0]
            self._gaps[tuple(text)] = gaps.tolist()
