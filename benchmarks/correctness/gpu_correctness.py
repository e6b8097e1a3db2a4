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
import torch
from torch import Tensor

from benchmarks import results
from benchmarks.engine.offline import BenchmarkEngine
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import (
    AttentionChoice,
    Device,
    DType,
    LoadFormat,
    Transport,
    WorkerSettings,
)
from radixgrove.worker.engine.leader import GroupExecutor
from radixgrove.worker.engine.orders import BEAT_SECONDS
from radixgrove.worker.messages import Submit, TokenLogprobs, Tokens
from radixgrove.worker.plan import StepPlan

PROMPTS, NEW_TOKENS = 50, 64
EAGER_PROMPTS = 12  # one by one without graphs is slow
KL_BOUND = 1e-3
# Gaps of float32 log-probability that are ties; random weights make flat distributions.
REAL_TIE, RANDOM_TIE = 2e-5, 1e-4
# A first choice is close when both are in each other's top 5, or within so many mean errors of
# transformers' own bfloat16, or as close as its own choices (a router's choice makes leaps).
CLOSE_ERRORS = 8.0
_BATCH = 25  # texts a forward pass of the reference
MODELS: dict[str, dict[str, Any]] = {
    "llama-9-3": {"kind": "LlamaConfig", "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama-8-2": {"kind": "LlamaConfig", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen2-7-1": {"kind": "Qwen2Config", "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3-8-2": {"kind": "Qwen3Config", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3-moe-8-2": {
        "kind": "Qwen3MoeConfig",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "mixtral-8-2": {"kind": "MixtralConfig", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3-30b-a3b-4": {  # four layers of its widths
        "kind": "Qwen3MoeConfig",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "initializer_range": 0.02,
    },
}
DEFAULT = ["llama-9-3", "qwen2-7-1", "qwen3-8-2"]  # the first not beside a model that is given
SPLIT = ["llama-8-2", "qwen3-8-2"]  # by 2 ranks


@dataclass
class Counters:
    """What the engine really did."""

    steps: int = 0
    continued_chunks: int = 0  # prefill chunks that do not start their row
    largest_batch: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0  # of those from the host
    replays: int = 0  # of decodes
    mixed_replays: int = 0  # of steps with chunks
    ranks: int = 1  # that launched steps


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Subject:
    """One engine, with a count of its plans."""

    def __init__(self, model_dir: Path, dtype: DType, backend: str, **options: Any) -> None:
        settings = WorkerSettings(
            device=Device.CUDA if torch.cuda.is_available() else Device.CPU,
            dtype=dtype,
            load_format=LoadFormat.SAFETENSORS,
            attention_backend=AttentionChoice(backend),
            max_model_len=1024,
            max_running=64,
            **{"kv_tokens": 65536, **options},
        )
        self.engine = BenchmarkEngine(settings, model_dir)
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
        before, scheduler = self._replays(), self.engine.scheduler
        counted = scheduler.counters
        self.counters = Counters(
            cached_tokens=-counted.cached_tokens, loaded_tokens=-counted.host_cached_tokens
        )
        for group in groups:
            for index in group:
                self._submit(str(index), prompts[index], SamplingParams(seed=index, **sampling))
            while scheduler.has_work:
                self.engine.turn()
                for output in scheduler.take_outputs().get(0, []):
                    self._take(output, found)
        self.counters.cached_tokens += counted.cached_tokens
        self.counters.loaded_tokens += counted.host_cached_tokens
        after = self._replays()
        self.counters.replays = after[0] - before[0]
        self.counters.mixed_replays = after[1] - before[1]
        self.counters.ranks = self._ranks()
        return found

    def _replays(self) -> tuple[int, int]:
        """Of rank 0: of decodes, and of steps with chunks."""
        executor = self.engine.executor
        runner = getattr(executor, "_runner", executor)
        decodes, mixed = (getattr(runner, name, None) for name in ("_graphs", "_mixed"))
        return (decodes.replays if decodes else 0), (mixed.replays if mixed else 0)

    def _ranks(self) -> int:
        executor = self.engine.executor
        if not isinstance(executor, GroupExecutor):
            return 1
        peers = executor._links._peers.values()
        deadline = time.monotonic() + 4 * BEAT_SECONDS  # they say it with their heartbeats
        while time.monotonic() < deadline and not all(peer.orders for peer in peers):
            time.sleep(BEAT_SECONDS / 10)
        return 1 + sum(peer.orders > 0 for peer in peers)

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
        for begin in range(0, len(texts), _BATCH):
            batch = texts[begin : begin + _BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
            logits: Tensor = self._model(ids.to(self._device)).logits
            for row, text in zip(logits, batch, strict=True):
                yield row[: len(text)].float().log_softmax(-1)

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

    def own_kl(self, texts: list[list[int]]) -> float:
        """`Reference.rescoring_kl` in bfloat16, of the first texts asked about: it is slow."""
        if self._own_kl is None:
            self._own_kl = self.rounded.rescoring_kl(texts, len(texts[0]) - 2)
        return self._own_kl

    def disagreement(self, prompts: list[list[int]], out: list[Generated]) -> tuple[str, int]:
        """The first token that is not transformers' choice, if any, and the number of ties."""
        texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
        self._judge(prompts, texts)
        ties = 0
        for index, text in enumerate(texts):
            for at, gap in enumerate(self._gaps[tuple(text)]):
                if gap > self.tie:
                    return f"prompt {index} differs at token {at}, {gap:.2e} below the best", ties
                ties += gap > 0
        return "", ties

    def _judge(self, prompts: list[list[int]], texts: list[list[int]]) -> None:
        """How far each generated token is below transformers' best one, for texts not seen yet."""
        new = [(p, t) for p, t in zip(prompts, texts, strict=True) if tuple(t) not in self._gaps]
        rows = self.exact.logprobs([text for _, text in new])
        for (prompt, text), row in zip(new, rows, strict=True):
            logprobs = row[len(prompt) - 1 : -1]
            ours = torch.tensor(text[len(prompt) :], device=row.device)[:, None]
            gaps = logprobs.amax(-1) - logprobs.gather(1, ours)[:, 0]
            self._gaps[tuple(text)] = gaps.tolist()


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

    usual = {
        "hidden_size": MODELS[name]["num_attention_heads"] * 128,
        "head_dim": 128,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "tie_word_embeddings": name.startswith("qwen3"),
    }
    options = usual | MODELS[name]
    config = getattr(transformers, options.pop("kind"))(**options)
    torch.manual_seed(0)
    kind: Any = transformers.AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind.from_config(config, dtype=torch.float32)
    # Weights that bfloat16 holds: what is compared is arithmetic alone.
    model.bfloat16().save_pretrained(directory / name)
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
    what: str, subject: Subject, prompts: list[list[int]], judge: Judge, report: Report
) -> None:
    """KL between the distribution that decoding sampled from and prefill's of the same text.

    Both round to bfloat16 in different places, so the bound is what transformers itself reaches on
    these texts, should that be more than `KL_BOUND`.
    """
    for cache in ("cold", "warm"):
        out = subject.generate(prompts, max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0)
        proved = (subject.counters.cached_tokens > 0) == (cache == "warm")
        texts = [p + g.token_ids for p, g in zip(prompts, out, strict=True)]
        rescored = subject.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        log_ratios = []
        for generated, score in zip(out, rescored, strict=True):
            decode = torch.tensor([entry.logprob for entry in generated.logprobs])
            log_ratios.append(scored(score)[-len(decode) :] - decode)
        kl = kl_estimate(torch.cat(log_ratios))
        shortest = min(map(len, texts))
        theirs = judge.own_kl([text[-shortest:] for text in texts[:_BATCH]])
        report.check(
            f"{what}: decode then rescore, {cache} cache",
            proved and kl < max(KL_BOUND, theirs),
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
        "transport": Transport(arguments.transport),
    }
    several = arguments.tp * arguments.pp > 1
    name = f"{model} tp {arguments.tp} pp {arguments.pp}" if several else model
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


Named = tuple[str, Path, float]  # a model's name and directory, and what is a tie there


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--random", nargs="*", choices=MODELS, help="random models to make")


def chosen_models(
    arguments: argparse.Namespace, default: Callable[[bool], list[str]], scratch: Path
) -> list[Named]:
    """The model of `--model`, then random ones made in `scratch`.

    Args:
        default: names of random ones where none are asked for, if a model is given, and if not.
    """
    given = arguments.model
    models = [] if given is None else [(given.name, given, REAL_TIE)]
    names = default(given is not None) if arguments.random is None else arguments.random
    return models + [(name, make_random_model(name, scratch), RANDOM_TIE) for name in names]


def forbid_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--backend", nargs="+", default=["torch", "triton", "flashinfer"])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages")
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
