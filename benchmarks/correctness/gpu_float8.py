"""KV in float8 against Hugging Face transformers in float32, and against itself.

    python -m benchmarks.correctness.gpu_float8 [--model DIR] [--random NAME ...] [--backend triton]

Two things are judged, each with a cold and with a warm cache:

- models in bfloat16: how far log-probabilities are from transformers' in float32, beside
  transformers' own in bfloat16. Float8's steps are 16 times as wide, but K and V are two of many
  tensors;
- how far decoding is from scoring the same text; in float32 too. Random models have few layers, and
  suffer most from float8: a chunk that attended to K and V other than those in pages would show.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.correctness.gpu_correctness import (
    DEFAULT,
    GREEDY,
    NEW_TOKENS,
    forbid_tf32,
    scored,
)
from benchmarks.correctness.judge import Judge, Report, kl_estimate
from benchmarks.correctness.models import MODELS, add_model_options, chosen_models, make_prompts
from benchmarks.correctness.subject import Generated, Subject
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import DType, KVDType

# Of the mean distance of log-probabilities, in those of transformers' own bfloat16.
DISTANCE_BOUND = 16.0
# Decoding and scoring round to their dtype in different places, and what lies between two float8
# tips over now and then: a wide step from a small difference, and more of them in each layer. On a
# CPU at most 6e-3 with the 30 layers of SmolLM2; with the 6 of random models 1.3e-3, and 6e-6 in
# float32, but 1e-2 at least with fresh chunks that are not rounded.
KL_BOUND_DEEP = 2e-2
KL_BOUNDS = {DType.BFLOAT16: 5e-3, DType.FLOAT32: 1e-4}
_TEXTS = 25


def check(
    model: str, model_dir: Path, backend: str, texts: int, judge: Judge, report: Report
) -> None:
    bounds = KL_BOUNDS if model in MODELS else {DType.BFLOAT16: KL_BOUND_DEEP}
    for dtype, bound in bounds.items():
        what = f"{model} float8 {backend} {dtype.value}"
        with report.guarded(what):
            check_dtype(what, model_dir, dtype, backend, texts, bound, judge, report)


def check_dtype(
    what: str,
    model_dir: Path,
    dtype: DType,
    backend: str,
    texts: int,
    bound: float,
    judge: Judge,
    report: Report,
) -> None:
    subject = Subject(model_dir, dtype, backend, kv_dtype=KVDType.FP8_E4M3)
    try:
        info = subject.engine.info
        config = load_config(model_dir)
        values = 2 * config.num_layers * config.attention.keys
        one = info.kv_bytes_per_token == values
        report.check(f"{what}: one byte a value", one, f"{values} values a token")
        prompts = make_prompts(model_dir, info.vocab_size)[:texts]
        for cache in ("cold", "warm") if dtype == DType.BFLOAT16 else ():
            out = subject.generate(prompts, logprobs=0, **GREEDY)
            proved = (subject.counters.cached_tokens > 0) == (cache == "warm")
            check_distance(f"{what}: distance, {cache} cache", prompts, out, proved, judge, report)
        subject.flush()
        for cache in ("cold", "warm"):
            name = f"{what}: decode then rescore, {cache} cache"
            check_rescoring(name, subject, prompts, bound, report)
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


def check_rescoring(
    what: str, subject: Subject, prompts: list[list[int]], bound: float, report: Report
) -> None:
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
        what, proved and kl < bound, f"KL {kl:.2e}" + ("" if proved else "; not proved"), kl=kl
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--backend", nargs="+", default=["triton"])
    parser.add_argument("--texts", type=int, default=_TEXTS)
    arguments = parser.parse_args(argv)
    forbid_tf32()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        models = chosen_models(arguments, lambda given: DEFAULT[given:], Path(scratch))
        for model, model_dir, tie in models:
            judge = Judge.of(model_dir, tie)
            for backend in arguments.backend:
                check(model, model_dir, backend, arguments.texts, judge, report)
    print("all passed" if not report.failed else f"{report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
