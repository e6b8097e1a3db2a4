"""A float32 residual stream of few tokens, with the references of CUDA's kernels on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import tuning
from radixgrove.protocol.settings import DType
from radixgrove.worker.execution import build
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.ops import KernelOps

from . import tiny
from .driver import Driver, cpu_runner, greedy


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype]]:
    """Tokens and dtype of every state that logits are made of."""
    states: list[tuple[int, torch.dtype]] = []
    logits = Decoder.logits

    def noting(self: Decoder, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        states.append((hidden.shape[0], hidden.dtype))
        return logits(self, hidden, out)

    monkeypatch.setattr(Decoder, "logits", noting)
    monkeypatch.setattr(build, "choose_ops", lambda device: KernelOps())
    return states


def prompt_logprobs(runner: Runner, prompt: list[int]) -> Tensor:
    (result,) = Driver(runner).generate([prompt], greedy(1, prompt_logprobs=0))
    return torch.tensor([entry.logprob for entry in result.prompt_logprobs])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_is_nearer_to_float32(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: list[tuple[int, torch.dtype]],
) -> None:
    # As deep as SmolLM2, and with weights that bfloat16 holds: only the steps' roundings differ.
    for name, value in {"num_hidden_layers": 30, "initializer_range": 0.05}.items():
        monkeypatch.setitem(tiny._SIZES, name, value)
    tiny.save(kind, tmp_path).bfloat16().float().save_pretrained(tmp_path)
    prompt = tiny.prompts()[-1]
    exact = prompt_logprobs(cpu_runner(tmp_path), prompt)
    narrow = prompt_logprobs(cpu_runner(tmp_path, dtype=DType.BFLOAT16), prompt)
    monkeypatch.setenv("RADIXGROVE_WIDE_STREAM", "1")
    noted.clear()
    wide = prompt_logprobs(cpu_runner(tmp_path, dtype=DType.BFLOAT16), prompt)
    assert {dtype for _, dtype in noted} == {torch.float32}
    error, narrow_error = ((found - exact).square().mean() for found in (wide, narrow))
    assert error < 0.5 * narrow_error


def test_captured_steps_of_few_and_many_tokens_equal_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: list[tuple[int, torch.dtype]]
) -> None:
    """With few being up to four: larger sizes see the same buffer in the model's own dtype."""
    tiny.save("qwen3", tmp_path)
    monkeypatch.setenv("RADIXGROVE_WIDE_STREAM", "1")
    monkeypatch.setattr(tuning, "MANY_TOKENS", 4)
    prompts = tiny.prompts()[-7:]
    texts = []
    for captured in (False, True):
        runner = cpu_runner(tmp_path, dtype=DType.BFLOAT16)
        if captured:
            runner.capture([4, 8], lambda text, done: None)
        noted.clear()
        for rows in (3, 7):
            results = Driver(runner).generate(prompts[:rows], greedy(6))
            texts.append([result.tokens for result in results])
        sizes = {4: torch.float32, 8: torch.bfloat16} if captured else {3: torch.float32}
        assert sizes.items() <= dict(noted).items()
    # Padding changes no sum of a row; a batch of another size may.
    assert texts[:2] == texts[2:]
