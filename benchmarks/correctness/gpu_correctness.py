"""The engine on a GPU against Hugging Face transformers, in every mode, each proved by a counter.

    python -m benchmarks.correctness.gpu_correctness [--model DIR] [--backend torch triton]

Small models with random weights are made: Llama (9 query and 3 KV heads; not with `--model`), Qwen2
(groups of 7, bias) and Qwen3 (q/k norm). The first model goes through every mode, the others
through batches with graphs, without the torch backend. With `--tp` or `--pp` it is what so many
ranks say, of random models that can be split; `--modes` chooses, since each starts an engine.

Greedy equality is checked by teacher forcing: if, after the prompt and each of our tokens,
transformers' argmax is our next token, then its greedy text is ours. Two tokens may be so close
that the order of a float32 sum decides between them; those ties are counted, not hidden.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.correctness.judge import Judge, Report, kl_estimate
from benchmarks.correctness.models import add_model_options, chosen_models, make_prompts
from benchmarks.correctness.subject import Counters, Generated, Subject
from radixgrove.protocol.settings import DType, Transport

NEW_TOKENS = 64
EAGER_PROMPTS = 12  # one by one without graphs is slow
KL_BOUND = 1e-3
# A first choice is close when both are in each other's top 5, or within so many mean errors of
# transformers' own bfloat16, or as close as its own choices (a router's choice makes leaps).
CLOSE_ERRORS = 8.0
DEFAULT = ["llama-9-3", "qwen2-7-1", "qwen3-8-2"]  # the first not beside a model that is given
SPLIT = ["llama-8-2", "qwen3-8-2"]  # by 2 ranks
Mode = tuple[str, dict[str, Any], dict[str, Any], Callable[[Counters], bool]]
GREEDY: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0}


def modes(backend: str) -> list[Mode]:
    """Name, engine options, generate options, and the counter that proves it.

    The torch backend's plans hold host-side shapes, so it has no graphs on CUDA.
    """
    graphs = backend != "torch" and torch.cuda.is_available()
    return [
        (
            "batched, eager",
            {"cuda_graphs": False},
            {},
            lambda c: c.largest_batch > 8 and not c.replays + c.mixed_replays,
        ),
        (
            "one by one",
            {"cuda_graphs": graphs},
            {"one_by_one": True},
            lambda c: c.largest_batch == 1,
        ),
        *([("batched, graphs", {}, {}, lambda c: c.replays > 8)] if graphs else []),
        (
            "chunked",
            {"max_step_tokens": 64, "cuda_graphs": graphs},
            {},
            lambda c: c.continued_chunks > 8 and (c.mixed_replays > 8) == graphs,
        ),
    ]


# Less than the prompts and their answers take, so that prefixes leave for the host and come back.
HOST_TIER = {"host_cache_gib": 1.0, "kv_tokens": 4096}
BFLOAT16 = "bfloat16"
MODES = {  # names on the command line
    "eager": "batched, eager",
    "one-by-one": "one by one",
    "graphs": "batched, graphs",
    "chunked": "chunked",
    "host-tier": "host tier",
    BFLOAT16: BFLOAT16,
}


def parallel_modes(backend: str, ranks: dict[str, Any]) -> list[Mode]:
    """As `modes`, of several ranks, and with a host tier."""
    size = ranks["tp"] * ranks["pp"]
    found = [
        (name, {**ranks, **engine}, generate, lambda c, proof=proof: c.ranks == size and proof(c))
        for name, engine, generate, proof in modes(backend)
    ]
    found.append(("host tier", {**ranks, **HOST_TIER}, {}, lambda c: c.ranks == size))
    return found


def check_host_tier(what: str, subject: Subject, judge: Judge, report: Report) -> None:
    """Greedy text equals transformers' while prefixes come back from the host."""
    prompts = make_prompts(Path(), subject.engine.info.vocab_size)
    loaded = 0
    for turn in ("first", "second", "third"):
        out = subject.generate(prompts, **GREEDY)
        loaded += subject.counters.loaded_tokens
        difference, ties = judge.disagreement(prompts, out)
        detail = difference or f"{len(prompts)} x {NEW_TOKENS} tokens, {ties} ties"
        report.check(f"{what}, {turn} turn", not difference, detail, ties=ties)
    report.check(f"{what}: loads", loaded > 0, f"{loaded:,} tokens from the host")


def check_float32(
    model: str, model_dir: Path, backend: str, judge: Judge, chosen: list[Mode], report: Report
) -> None:
    """Greedy text equals transformers' in float32, cold and warm, in every mode."""
    for mode, engine_options, generate_options, proof in chosen:
        what = f"{model} fp32 {backend}: greedy = HF, {mode}"
        with report.guarded(what):
            subject = Subject(model_dir, DType.FLOAT32, backend, **engine_options)
            try:
                if "host_cache_gib" in engine_options:
                    check_host_tier(what, subject, judge, report)
                    continue
                prompts = make_prompts(model_dir, subject.engine.info.vocab_size)
                if generate_options.get("one_by_one") and not engine_options["cuda_graphs"]:
                    prompts = prompts[:EAGER_PROMPTS]
                for cache in ("cold", "warm"):
                    out = subject.generate(prompts, **generate_options, **GREEDY)
                    proved = proof(subject.counters) and (
                        (subject.counters.cached_tokens > 0) == (cache == "warm")
                    )
                    difference, ties = judge.disagreement(prompts, out)
                    detail = difference or f"{len(prompts)} x {NEW_TOKENS} tokens, {ties} ties"
                    if not proved:
                        detail += f"; mode not proved: {subject.counters}"
                    passed = proved and not difference
                    report.check(f"{what}, {cache}", passed, detail, ties=ties)
            finally:
                subject.close()


def scored(generated: Generated) -> Tensor:
    values = [entry.logprob for entry in generated.prompt_logprobs or [] if entry is not None]
    return torch.tensor(values)


def check_bfloat16(
    model: str,
    model_dir: Path,
    backend: str,
    judge: Judge,
    report: Report,
    options: dict[str, Any],
) -> None:
    """Teacher-forced logprobs and first choices against transformers', decoding against scoring."""
    subject = Subject(model_dir, DType.BFLOAT16, backend, **options)
    try:
        prompts = make_prompts(model_dir, subject.engine.info.vocab_size)
        what = f"{model} bf16 {backend}"
        check_logprobs(what, subject, prompts, judge, report)
        subject.flush()
        check_rescoring(what, subject, prompts, judge, report)
    finally:
        subject.close()


def check_logprobs(
    what: str, subject: Subject, prompts: list[list[int]], judge: Judge, report: Report
) -> None:
    """Logprobs within twice transformers' own error; close first choices."""
    out = subject.generate(prompts, logprobs=5, **GREEDY)
    texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
    rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    ours = theirs = count = 0.0
    differences = []
    own_widest = 0.0
    pairs = zip(judge.exact.logprobs(texts), judge.rounded.logprobs(texts), strict=True)
    for index, (true, rounded) in enumerate(pairs):
        tokens = torch.tensor(texts[index][1:], device=true.device)[:, None]
        exact = true[:-1].gather(1, tokens)[:, 0]
        bf16 = rounded[:-1].gather(1, tokens)[:, 0]
        ours += (scored(rescored[index]).to(true.device) - exact).abs().sum().item()
        theirs += (bf16 - exact).abs().sum().item()
        count += len(tokens)
        differences += first_difference(index, prompts[index], out[index], true)
        own_choices = true.gather(1, rounded.argmax(-1, keepdim=True))[:, 0]
        own_widest = max(own_widest, (true.amax(-1) - own_choices).max().item())
    ratio = ours / theirs
    report.check(
        f"{what}: logprob error <= 2 x HF bf16's",
        ratio <= 2.0,
        f"{ours / count:.2e} against {theirs / count:.2e}: {ratio:.2f} x",
    )
    bound = max(CLOSE_ERRORS * theirs / count, own_widest)
    far = [d for d in differences if not d.in_top and d.gap > bound]
    widest = max((d.gap for d in differences), default=0.0)
    report.check(
        f"{what}: first differing tokens are close",
        not far,
        "; ".join(map(str, far[:3]))
        or f"{len(differences)} of {len(prompts)} differ, by at most {widest:.3f}",
    )


@dataclass
class Difference:
    """Our first choice that is not float32's: how far below, and whether in each other's top 5."""

    prompt: int
    at: int
    gap: float
    in_top: bool


def first_difference(
    index: int, prompt: list[int], generated: Generated, true: Tensor
) -> list[Difference]:
    ours = torch.tensor(generated.token_ids, device=true.device)
    rows = true[len(prompt) - 1 : -1]
    wrong = (rows.argmax(-1) != ours).nonzero()
    if not len(wrong):
        return []
    at = int(wrong[0])
    row, token = rows[at], int(ours[at])
    our_top = [entry[0] for entry in generated.logprobs[at].top]
    in_top = token in row.topk(5).indices.tolist() and int(row.argmax()) in our_top
    return [Difference(index, at, (row.max() - row[token]).item(), in_top)]


def check_rescoring(
    what: str,
    subject: Subject,
    prompts: list[list[int]],
    judge: Judge,
    report: Report,
    *,
    allowed: float = 1.0,
    alone: int = 0,
) -> None:
    """KL between the distribution that decoding sampled from and prefill's of the same text.

    Both round to bfloat16 in different places, so the bound is `allowed` times what transformers
    itself reaches on these texts, should that be more than `KL_BOUND`.

    Args:
        alone: prompts that are also decoded one by one: steps of one token have kernels of their
            own.
    """
    for mode in ("cold cache", "warm cache", *(["one by one"] if alone else [])):
        apart = mode == "one by one"
        asked = prompts[:alone] if apart else prompts
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0}
        out = subject.generate(asked, one_by_one=apart, **sampling)
        proved = (subject.counters.cached_tokens > 0) == (mode != "cold cache")
        if apart:
            proved = subject.counters.largest_batch == 1
        texts = [p + g.token_ids for p, g in zip(asked, out, strict=True)]
        rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        log_ratios = []
        for generated, score in zip(out, rescored, strict=True):
            decode = torch.tensor([entry.logprob for entry in generated.logprobs])
            log_ratios.append(scored(score)[-len(decode) :] - decode)
        kl = kl_estimate(torch.cat(log_ratios))
        theirs = judge.own_kl(texts, NEW_TOKENS)
        report.check(
            f"{what}: decode then rescore, {mode}",
            proved and kl < max(KL_BOUND, allowed * theirs),
            f"KL {kl:.2e}, transformers' own {theirs:.2e}"
            + ("" if proved else f"; not proved: {subject.counters}"),
            kl=kl,
            kl_of_transformers=theirs,
        )


def check_model(
    model: str,
    model_dir: Path,
    judge: Judge,
    arguments: argparse.Namespace,
    report: Report,
    *,
    first: bool,
) -> None:
    """With every backend; all modes of the first model only."""
    ranks = {
        "tp": arguments.tp,
        "pp": arguments.pp,
        "ep": arguments.ep,
        "transport": Transport(arguments.transport),
    }
    several = arguments.tp * arguments.pp > 1
    name = model
    if several:
        name += f" tp {arguments.tp} pp {arguments.pp}"
    if arguments.ep > 1:
        name += f" ep {arguments.ep}"
    for backend in arguments.backend:
        if backend == "torch" and not (first or several):
            continue
        chosen = parallel_modes(backend, ranks) if several else modes(backend)
        if not first:
            chosen = [mode for mode in chosen if mode[0] == MODES["graphs"]]
        asked = [MODES[mode] for mode in arguments.modes]
        chosen = [mode for mode in chosen if mode[0] in asked]
        if backend != "flashinfer":
            with report.guarded(f"{name} fp32 {backend}"):
                check_float32(name, model_dir, backend, judge, chosen, report)
        if BFLOAT16 in arguments.modes and (first or not several):
            with report.guarded(f"{name} bf16 {backend}"):
                check_bfloat16(name, model_dir, backend, judge, report, ranks)


def forbid_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--backend", nargs="+", default=["torch", "triton", "flashinfer"])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument(
        "--transport", default="auto", choices=[t.value for t in Transport], help="between stages"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    arguments = parser.parse_args(argv)
    forbid_tf32()
    report = Report()

    def default(given: bool) -> list[str]:
        return SPLIT if arguments.tp * arguments.pp > 1 else DEFAULT[given:]

    with tempfile.TemporaryDirectory() as scratch:
        models = chosen_models(arguments, default, Path(scratch))
        for index, (model, model_dir, tie) in enumerate(models):
            judge = Judge.of(model_dir, tie)
            check_model(model, model_dir, judge, arguments, report, first=not index)
    print("all passed" if not report.failed else f"{report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
