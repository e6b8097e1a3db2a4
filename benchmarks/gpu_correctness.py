"""The engine on a GPU against Hugging Face transformers, in every mode, each proved by a counter.

    python benchmarks/gpu_correctness.py [--model DIR] [--backend torch triton flashinfer]

Without `--model` small models with random weights are made: Llama (9 query and 3 KV heads), Qwen2
(groups of 7, bias) and Qwen3 (q/k norm). Greedy equality is checked by teacher forcing: if, after
the prompt and each of our tokens, transformers' argmax is our next token, then its greedy text is
ours.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
from offline import OfflineEngine
from torch import Tensor

from radixgrove.protocol.sampling import SamplingParams
from radixgrove.protocol.settings import AttentionBackend, Device, DType, LoadFormat, WorkerSettings
from radixgrove.worker.messages import Submit, TokenLogprobs, Tokens
from radixgrove.worker.plan import StepPlan

PROMPTS, NEW_TOKENS = 50, 64
KL_BOUND = 1e-3
MODELS: dict[str, dict[str, Any]] = {
    "llama-9-3": {"kind": "LlamaConfig", "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen2-7-1": {"kind": "Qwen2Config", "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3-8-2": {"kind": "Qwen3Config", "num_attention_heads": 8, "num_key_value_heads": 2},
}


@dataclass
class Counters:
    """What the engine really did."""

    steps: int = 0
    continued_chunks: int = 0  # prefill chunks that do not start their row
    largest_batch: int = 0
    cached_tokens: int = 0
    replays: int = 0


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Subject:
    """One engine, whose plans are counted."""

    def __init__(self, model_dir: Path, dtype: DType, backend: str, **options: Any) -> None:
        settings = WorkerSettings(
            device=Device.CUDA if torch.cuda.is_available() else Device.CPU,
            dtype=dtype,
            load_format=LoadFormat.SAFETENSORS,
            attention_backend=AttentionBackend(backend),
            max_model_len=1024,
            max_running=64,
            kv_tokens=65536,
            **options,
        )
        self.engine = OfflineEngine(settings, model_dir)
        self.counters = Counters()
        launch = self.engine.executor.launch

        def counting(plan: StepPlan) -> None:
            self.counters.steps += 1
            self.counters.continued_chunks += sum(c.start > 0 for c in plan.prefills)
            self.counters.largest_batch = max(self.counters.largest_batch, len(plan.decodes))
            launch(plan)

        self.engine.executor.launch = counting  # type: ignore[method-assign]

    def generate(
        self, prompts: list[list[int]], *, one_by_one: bool = False, **sampling: Any
    ) -> list[Generated]:
        found = [Generated() for _ in prompts]
        groups = [[i] for i in range(len(prompts))] if one_by_one else [list(range(len(prompts)))]
        replays, scheduler = self._replays(), self.engine.scheduler
        self.counters = Counters(cached_tokens=-scheduler.counters.cached_tokens)
        for group in groups:
            for index in group:
                self._submit(str(index), prompts[index], SamplingParams(seed=index, **sampling))
            while self.engine.launch():
                self.engine.complete()
                for output in scheduler.take_outputs().get(0, []):
                    self._take(output, found)
        self.counters.cached_tokens += scheduler.counters.cached_tokens
        self.counters.replays = self._replays() - replays
        return found

    def _replays(self) -> int:
        graphs = getattr(self.engine.executor, "_graphs", None)
        return 0 if graphs is None else int(graphs.replays)

    def _submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.engine.scheduler.submit(
            Submit(
                request_id=request_id,
                frontend=0,
                token_ids=np.array(prompt, dtype="<i4").tobytes(),
                sampling=sampling,
                domain="public",
            ),
            time.time(),
        )

    def _take(self, output: Any, found: list[Generated]) -> None:
        if not isinstance(output, Tokens):
            raise RuntimeError(f"refused: {output.detail}")
        item = found[int(output.request_id)]
        item.token_ids += output.token_ids
        item.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            item.prompt_logprobs = output.prompt_logprobs

    def flush(self) -> None:
        self.engine.scheduler.flush_cache()

    def close(self) -> None:
        self.engine.close()


class Report:
    """Rows of the table; remembers whether anything failed."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, what: str, passed: bool, detail: str, **record: Any) -> None:
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'}  {what:<58}  {detail}", flush=True)
        results.record(
            {"benchmark": "correctness", "check": what, "passed": passed, "detail": detail} | record
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
    def logprobs(self, token_ids: list[int]) -> Tensor:
        """[n, V] float32: row i is the distribution of token i + 1."""
        ids = torch.tensor([token_ids], device=self._device)
        logits: Tensor = self._model(ids).logits[0]
        return logits.float().log_softmax(-1)


def make_prompts(model_dir: Path, vocab_size: int) -> list[list[int]]:
    """Paragraphs of this project's documentation, or random ids for a model without tokenizer."""
    rng = random.Random(1)
    tokenizer_file = model_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        return [
            [rng.randrange(vocab_size) for _ in range(rng.randint(3, 200))] for _ in range(PROMPTS)
        ]
    from tokenizers import Tokenizer

    text = "\n".join(path.read_text() for path in sorted(results.ROOT.glob("**/*.md"))[:40])
    ids = Tokenizer.from_file(str(tokenizer_file)).encode(text[:400_000]).ids
    starts = [rng.randrange(len(ids) - 200) for _ in range(PROMPTS)]
    return [ids[start : start + rng.randint(3, 200)] for start in starts]


def make_random_model(name: str, directory: Path) -> Path:
    import transformers

    options = dict(MODELS[name])
    config = getattr(transformers, options.pop("kind"))(
        hidden_size=options["num_attention_heads"] * 128,
        head_dim=128,
        intermediate_size=2048,
        num_hidden_layers=6,
        vocab_size=4096,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=name.startswith("qwen3"),
        **options,
    )
    torch.manual_seed(0)
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory / name)
    return directory / name


# ---- the checks ------------------------------------------------------------------------------

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
            lambda c: c.largest_batch > 8 and not c.replays,
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
            lambda c: c.continued_chunks > 8,
        ),
    ]


def greedy_agreement(reference: Reference, prompts: list[list[int]], out: list[Generated]) -> str:
    """Empty when transformers' argmax is our token everywhere; else the first disagreement."""
    for index, (prompt, generated) in enumerate(zip(prompts, out, strict=True)):
        logprobs = reference.logprobs(prompt + generated.token_ids)[len(prompt) - 1 : -1]
        ours = torch.tensor(generated.token_ids, device=logprobs.device)
        wrong = (logprobs.argmax(-1) != ours).nonzero()
        if len(wrong):
            at = int(wrong[0])
            gap = (logprobs[at].max() - logprobs[at, ours[at]]).item()
            return f"prompt {index} differs at token {at}, {gap:.2e} below the best"
    return ""


def check_float32(model: str, model_dir: Path, backend: str, report: Report) -> None:
    """Greedy text equals transformers' in float32, cold and warm, in every mode."""
    reference = Reference(model_dir, torch.float32)
    for mode, engine_options, generate_options, proof in modes(backend):
        what = f"{model} fp32 {backend}: greedy = HF, {mode}"
        with report.guarded(what):
            subject = Subject(model_dir, DType.FLOAT32, backend, **engine_options)
            try:
                prompts = make_prompts(model_dir, subject.engine.info.vocab_size)
                for cache in ("cold", "warm"):
                    out = subject.generate(prompts, **generate_options, **GREEDY)
                    proved = proof(subject.counters) and (
                        (subject.counters.cached_tokens > 0) == (cache == "warm")
                    )
                    difference = greedy_agreement(reference, prompts, out)
                    detail = difference or f"{len(prompts)} x {NEW_TOKENS} tokens"
                    if not proved:
                        detail += f"; mode not proved: {subject.counters}"
                    report.check(f"{what}, {cache}", proved and not difference, detail)
            finally:
                subject.close()


def scored(generated: Generated) -> Tensor:
    values = [entry.logprob for entry in generated.prompt_logprobs or [] if entry is not None]
    return torch.tensor(values)


def check_bfloat16(model: str, model_dir: Path, backend: str, report: Report) -> None:
    """Teacher-forced logprobs within twice transformers' own error; close first choices."""
    exact, rounded = Reference(model_dir, torch.float32), Reference(model_dir, torch.bfloat16)
    subject = Subject(model_dir, DType.BFLOAT16, backend)
    try:
        prompts = make_prompts(model_dir, subject.engine.info.vocab_size)
        out = subject.generate(prompts, logprobs=5, **GREEDY)
        texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
        rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        ours = theirs = count = 0.0
        outside = []
        for prompt, text, generated, score in zip(prompts, texts, out, rescored, strict=True):
            tokens = torch.tensor(text[1:])
            true, bf16 = (r.logprobs(text)[:-1].cpu() for r in (exact, rounded))
            at = (torch.arange(len(tokens)), tokens)
            ours += (scored(score) - true[at]).abs().sum().item()
            theirs += (bf16[at] - true[at]).abs().sum().item()
            count += len(tokens)
            outside += first_difference(prompt, generated, true)
        what = f"{model} bf16 {backend}"
        ratio = ours / theirs
        report.check(
            f"{what}: logprob error <= 2 x HF bf16's",
            ratio <= 2.0,
            f"{ours / count:.2e} against {theirs / count:.2e}: {ratio:.2f} x",
        )
        report.check(
            f"{what}: first differing tokens in each other's top 5",
            not outside,
            "; ".join(outside[:3]) or f"{len(prompts)} prompts",
        )
    finally:
        subject.close()


def first_difference(prompt: list[int], generated: Generated, true: Tensor) -> list[str]:
    """A complaint when our first choice that is not float32's is far from it."""
    for at, token in enumerate(generated.token_ids):
        row = true[len(prompt) - 1 + at]
        best = int(row.argmax())
        if best == token:
            continue
        our_top = [entry[0] for entry in generated.logprobs[at].top]
        if token not in row.topk(5).indices.tolist() or best not in our_top:
            return [f"token {at}: {token} against {best}"]
        return []
    return []


def check_rescoring(model: str, model_dir: Path, backend: str, report: Report) -> None:
    """KL between the distribution that decoding sampled from and prefill's of the same text.

    Estimated on the sampled tokens as the mean of r - 1 - log r, r = prefill / decode.
    """
    subject = Subject(model_dir, DType.BFLOAT16, backend)
    try:
        prompts = make_prompts(model_dir, subject.engine.info.vocab_size)
        for cache in ("cold", "warm"):
            out = subject.generate(prompts, max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0)
            proved = (subject.counters.cached_tokens > 0) == (cache == "warm")
            texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
            rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
            terms = []
            for generated, score in zip(out, rescored, strict=True):
                decode = torch.tensor([entry.logprob for entry in generated.logprobs])
                log_ratio = scored(score)[-len(decode) :] - decode
                terms.append(log_ratio.exp() - 1 - log_ratio)
            kl = torch.cat(terms).mean().item()
            report.check(
                f"{model} bf16 {backend}: decode then rescore, {cache} cache",
                proved and kl < KL_BOUND,
                f"KL {kl:.2e}" + ("" if proved else f"; not proved: {subject.counters}"),
                kl=kl,
            )
    finally:
        subject.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--random", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backend", nargs="+", default=["torch", "triton", "flashinfer"])
    arguments = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        models: list[tuple[str, Path]] = []
        if arguments.model is not None:
            models.append((arguments.model.name, arguments.model))
        models += [(name, make_random_model(name, Path(scratch))) for name in arguments.random]
        for model, model_dir in models:
            for backend in arguments.backend:
                if backend != "flashinfer":
                    with report.guarded(f"{model} fp32 {backend}"):
                        check_float32(model, model_dir, backend, report)
                for check in (check_bfloat16, check_rescoring):
                    with report.guarded(f"{model} bf16 {backend} {check.__name__}"):
                        check(model, model_dir, backend, report)
    print("all passed" if not report.failed else f"{report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
