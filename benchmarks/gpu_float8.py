"""KV in float8 against Hugging Face transformers in float32, and against itself.

    python benchmarks/gpu_float8.py [--model DIR] [--random NAME ...] [--backend triton flashinfer]

Models in bfloat16 with KV in float8. Two things are judged, each with a cold and with a warm cache:

- how far log-probabilities are from transformers' in float32, beside transformers' own in bfloat16;
- how far decoding, which reads K and V out of pages, is from scoring the same text, which takes the
  step's own. Were one of them to see other than what float8 holds, this would show it.

Float8's steps are 16 times as wide as bfloat16's, but K and V are two of many tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_correctness import (
    DEFAULT,
    GREEDY,
    MODELS,
    NEW_TOKENS,
    RANDOM_TIE,
    REAL_TIE,
    Generated,
    Judge,
    Report,
    Subject,
    kl_estimate,
    make_prompts,
    make_random_model,
    scored,
)
from torch import Tensor

from radixgrove.protocol.settings import DType, KVDType
from radixgrove.worker.models.config import load_config

# Of the mean distance of log-probabilities, in those of transformers' own bfloat16.
DISTANCE_BOUND = 16.0
# Decoding and scoring round to bfloat16 in different places, and what lies between two float8
# tips over now and then: a wider step for the same value.
KL_BOUND = 2e-2
_TEXTS = 25


def check(
    model: str, model_dir: Path, backend: str, texts: int, judge: Judge, report: Report
) -> None:
    subject = Subject(model_dir, DType.BFLOAT16, backend, kv_dtype=KVDType.FP8_E4M3)
    try:
        info = subject.engine.info
        what = f"{model} float8 {backend}"
        config = load_config(model_dir)
        values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        one = info.kv_bytes_per_token == values
        report.check(f"{what}: one byte a value", one, f"{values} values a token")
        prompts = make_prompts(model_dir, info.vocab_size)[:texts]
        for cache in ("cold", "warm"):
            out = subject.generate(prompts, logprobs=0, **GREEDY)
            proved = (subject.counters.cached_tokens > 0) == (cache == "warm")
            check_distance(f"{what}: distance, {cache} cache", prompts, out, proved, judge, report)
        subject.flush()
        for cache in ("cold", "warm"):
            check_rescoring(f"{what}: decode then rescore, {cache} cache", subject, prompts, report)
    finally:
        subject.close()


def check_distance(
    what: str,
    prompts: list[list[int]],
    out: list[Generated],
    proved: bool,
    judge: Judge,
    report: Report,
) -> None:
    """Of the log-probabilities of our greedy texts, and how many tokens are transformers' too."""
    ours, theirs, agreed = [], [], []
    for exact, rounded, tokens, generated in _teacher_forced(prompts, out, judge):
        own = torch.tensor([entry.logprob for entry in generated.logprobs], device=exact.device)
        true = exact.gather(1, tokens)[:, 0]
        ours.append((own - true).abs())
        theirs.append((rounded.gather(1, tokens)[:, 0] - true).abs())
        agreed.append(exact.argmax(-1) == tokens[:, 0])
    distance, reference = torch.cat(ours).mean().item(), torch.cat(theirs).mean().item()
    share = torch.cat(agreed).float().mean().item()
    report.check(
        what,
        proved and distance <= DISTANCE_BOUND * reference,
        f"{distance:.2e} against {reference:.2e}: {distance / reference:.1f} x; {share:.1%} of "
        f"tokens are float32's" + ("" if proved else "; not proved"),
        distance=distance,
        distance_of_bfloat16=reference,
        agreement=share,
    )


def _teacher_forced(
    prompts: list[list[int]], out: list[Generated], judge: Judge
) -> Iterator[tuple[Tensor, Tensor, Tensor, Generated]]:
    """Of each text: transformers' distributions in float32 and bfloat16, our tokens, ours."""
    texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
    pairs = zip(judge.exact.logprobs(texts), judge.rounded.logprobs(texts), strict=True)
    for prompt, generated, (exact, rounded) in zip(prompts, out, pairs, strict=True):
        own = slice(len(prompt) - 1, -1)
        tokens = torch.tensor(generated.token_ids, device=exact.device)[:, None]
        yield exact[own], rounded[own], tokens, generated


def check_rescoring(what: str, subject: Subject, prompts: list[list[int]], report: Report) -> None:
    """KL between what decoding sampled from and what scoring the same text gives."""
    out = subject.generate(prompts, max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0)
    proved = (subject.counters.cached_tokens > 0) == ("warm" in what)
    texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
    rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    ratios = []
    for generated, score in zip(out, rescored, strict=True):
        decode = torch.tensor([entry.logprob for entry in generated.logprobs])
        ratios.append(scored(score)[-len(decode) :] - decode)
    kl = kl_estimate(torch.cat(ratios))
    report.check(
        what, proved and kl < KL_BOUND, f"KL {kl:.2e}" + ("" if proved else "; not proved"), kl=kl
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--random", nargs="*", choices=MODELS, help="random models to make")
    parser.add_argument("--backend", nargs="+", default=["triton", "flashinfer"])
    parser.add_argument("--texts", type=int, default=_TEXTS)
    arguments = parser.parse_args(argv)
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        models: list[tuple[str, Path, float]] = []
        if arguments.model is not None:
            models.append((arguments.model.name, arguments.model, REAL_TIE))
        names = arguments.random
        if names is None:
            names = DEFAULT[bool(models) :]
        models += [(name, make_random_model(name, Path(scratch)), RANDOM_TIE) for name in names]
        for model, model_dir, tie in models:
            judge = Judge.of(model_dir, tie)
            for backend in arguments.backend:
                with report.guarded(f"{model} float8 {backend}"):
                    check(model, model_dir, backend, arguments.texts, judge, report)
    print("all passed" if not report.failed else f"{report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
