"""Which kernel multiplies: measured on the device while the engine warms up, and kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixgrove.kernels import cublaslt
from radixgrove.kernels._triton import cdiv, next_power_of_2
from radixgrove.kernels.activation import silu_and_mul
from radixgrove.kernels.compilers import Room, compiling_apart
from radixgrove.kernels.cublaslt import CublasLtConfig
from radixgrove.kernels.gemv import GemvConfig
from radixgrove.kernels.linear_candidates import (
    BUCKETS,
    FLOAT8_CANDIDATES,
    GEMV_CANDIDATES,
    MANY_TOKENS,
    SKINNY_CANDIDATES,
    Key,
    Projection,
    bucket_of,
    candidates,
    own_candidates,
)
from radixgrove.kernels.matmul import CUBLAS, SCALED, Choice, Scratch, multiply
from radixgrove.kernels.norm import add_rms_norm, rms_norm
from radixgrove.kernels.scaled import feed, library_takes, multiply_quantized
from radixgrove.kernels.skinny import SkinnyConfig
from radixgrove.kernels.timing import fastest
from radixgrove.kernels.tuned_files import keep, tuned_path
from radixgrove.kernels.weight import Weight

_COLD_BYTES = 256 << 20  # of weights in a row, so that the L2 cache does not hold them
_FORMAT = 9  # of the file
_Shape = tuple[torch.dtype, Key]


class LinearTuner:
    """Chooses a kernel by token count, and the weight's format and shape.

    Untuned shapes take `gemv` for one token (its fusions save launches) and cuBLAS otherwise.
    """

    def __init__(self) -> None:
        self._choices: dict[_Shape, Choice] = {}
        self._scratch: dict[torch.device, Scratch] = {}

    def choose(self, tokens: int, weight: Weight, *, silu: bool) -> Choice:
        """The kernel for `tokens` rows; float32 always takes cuBLAS past one token."""
        default = GEMV_CANDIDATES[2] if tokens == 1 else CUBLAS
        if tokens > 1 and weight.quantized and weight.block is None and library_takes(weight):
            default = SCALED
        key = (weight.format, bucket_of(tokens), *weight.shape, silu)
        return self._choices.get((weight.dtype, key), default) if tokens else CUBLAS

    def scratch(self, device: torch.device) -> Scratch:
        """Made on first use, which must be outside graph capture."""
        if device not in self._scratch:
            self._scratch[device] = Scratch(device)
        return self._scratch[device]

    @contextmanager
    def compiling(
        self,
        projections: Sequence[Projection],
        max_batch: int,
        max_tokens: int,
        room: Room,
        others: Sequence[Callable[[], object]] = (),
    ) -> Iterator[None]:
        """Meanwhile compile, in threads, what `tune` with these arguments has to measure.

        Weights may be loading: they are read, and what comes out is dropped.

        Args:
            others: launches of other kernels that will be needed, which come first.
        """
        device, dtype = _place(projections)
        if not _is_tunable(device, dtype):
            yield
            return
        known = _read(_cache_path(device, dtype))
        scratch = self.scratch(device)
        jobs: dict[object, Callable[[], object]] = {}
        for bucket, projection in _work(projections, max_batch, max_tokens):
            if projection.key(bucket) in known:
                continue
            trial = _Trial(projection, bucket, scratch)
            kind = projection.weights[0].format, next_power_of_2(bucket), projection.endings
            for choice in own_candidates(bucket, projection, scratch):
                forms = kind, _in_one_step(choice, projection)
                jobs.setdefault((choice, forms), partial(trial.run_once, choice))
            if bucket == 1 and (projection.silu or projection.residual):
                jobs.setdefault((projection.outputs, projection.silu), trial.run_endings)
        # What was never measured was most likely never compiled.
        apart = compiling_apart(device, room.processes, at_once=bool(jobs))
        with apart, ThreadPoolExecutor(room.threads, "compile-kernels") as executor:
            _submit(executor, [*others, *jobs.values()], device)
            try:
                yield
            except BaseException:  # the rest is of no use
                executor.shutdown(wait=False, cancel_futures=True)
                raise
        torch.cuda.synchronize(device)

    def tune(
        self,
        projections: Sequence[Projection],
        max_batch: int,
        max_tokens: int,
        report: Callable[[str, float], None] = lambda message, fraction: None,
    ) -> None:
        """Measure every candidate on the model's own weights, or read an earlier measurement.

        Nothing off CUDA or in float32.

        Args:
            max_batch: the most rows of a decode step.
            max_tokens: the most tokens of a step.
            report: called with a message and the fraction done.
        """
        device, dtype = _place(projections)
        if not _is_tunable(device, dtype):
            return
        path = _cache_path(device, dtype)
        known = _read(path)
        before = len(known)
        todo = list(_work(projections, max_batch, max_tokens))
        for done, (bucket, projection) in enumerate(todo):
            key = projection.key(bucket)
            if key not in known:
                report(f"tuning {key[2]}x{key[3]} for {bucket} tokens", done / len(todo))
                known[key] = _fastest(bucket, projection, self.scratch(device))
            self._choices[dtype, key] = known[key]
        if len(known) > before:
            _write(path, known)


def _in_one_step(choice: Choice, projection: Projection) -> bool:
    """Whether `gemv` takes all of K at once, which is another form of its kernel."""
    columns = projection.weights[0].shape[1]
    return choice.gemv is not None and choice.gemv.block_k >= columns


def _place(projections: Sequence[Projection]) -> tuple[torch.device, torch.dtype]:
    weight = projections[0].weights[0]
    return weight.device, weight.dtype


def _is_tunable(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float32


def _work(
    projections: Sequence[Projection], max_batch: int, max_tokens: int
) -> Iterator[tuple[int, Projection]]:
    """Buckets and projections that steps of such sizes come to."""
    for bucket in BUCKETS:
        for projection in projections:
            if bucket <= bucket_of(max_tokens if projection.every_token else max_batch):
                yield bucket, projection


def _submit(
    executor: ThreadPoolExecutor, jobs: Sequence[Callable[[], object]], device: torch.device
) -> None:
    """Run each once, so that its kernel is compiled."""
    # One stream for all threads: they share the scratch.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))

    def run(job: Callable[[], object], first: Future[None] | None) -> None:
        if first is not None:  # in which Triton finds its driver and tools
            wait([first])
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            job()

    first = None
    for job in jobs:
        # What fails here fails where it is needed, too.
        submitted = executor.submit(run, job, first)
        first = first or submitted


class _Trial:
    """Operands of one projection for so many tokens, and what is timed with them."""

    def __init__(self, projection: Projection, tokens: int, scratch: Scratch) -> None:
        weight = projection.weights[0]
        cold = 2 if tokens > MANY_TOKENS else cdiv(_COLD_BYTES, weight.nbytes)
        self.device = weight.device
        self._projection = projection
        self._tokens = tokens
        self._scratch = scratch
        self._weights = projection.weights[:cold]
        self._operands: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def _make_operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight = self._projection.weights[0]
        rows, columns = weight.shape
        x = torch.randn(self._tokens, columns, device=self.device).to(weight.dtype)
        like = torch.empty(0, dtype=weight.dtype, device=self.device)
        vector = like.new_ones(max(rows, columns))  # a norm's weight, or a bias
        residual = like.new_zeros(self._tokens, rows if self._projection.residual else 0)
        return x, vector[:columns], vector[:rows], residual

    def run(self, choice: Choice) -> None:
        """All weights once, each with the norm that comes before or, for many tokens, after."""
        for weight in self._weights:
            self._run(choice, weight)

    def run_once(self, choice: Choice) -> None:
        """The first weight: enough to compile and to load."""
        self._run(choice, self._weights[0])

    def run_endings(self) -> None:
        """What a library's product leaves to kernels of their own."""
        self._operands = self._operands or self._make_operands()
        projection, (_, _, of_outputs, residual) = self._projection, self._operands
        if projection.residual:
            add_rms_norm(torch.zeros_like(residual), residual, of_outputs, 1e-6)
        elif not projection.weights[0].quantized:
            silu_and_mul(of_outputs.new_zeros(self._tokens, len(of_outputs)))

    def _run(self, choice: Choice, weight: Weight) -> None:
        self._operands = self._operands or self._make_operands()
        x, of_inputs, of_outputs, residual = self._operands
        projection = self._projection
        if projection.feeds is not None:
            where: dict[str, Any] = {"choice": choice, "scratch": self._scratch}
            feed(x, weight, projection.feeds, norm=of_inputs, **where)
            return
        product = partial(
            multiply_quantized if weight.quantized else multiply,
            x,
            weight,
            of_outputs if projection.biased else None,
            choice=choice,
            scratch=self._scratch,
        )
        norm = of_inputs if projection.normed else None
        if projection.wide:
            wide = torch.empty(len(x), projection.outputs, device=self.device)
            product(norm=norm, out=wide)
        elif not projection.residual:
            product(norm=norm, silu=projection.silu)
        elif choice.deferred:
            add_rms_norm(product(), residual, of_outputs, 1e-6)
        else:
            product(residual=residual)
            if self._tokens > MANY_TOKENS:
                rms_norm(residual, of_outputs, 1e-6)


def _fastest(bucket: int, projection: Projection, scratch: Scratch) -> Choice:
    trial = _Trial(projection, bucket, scratch)
    return fastest(candidates(bucket, projection, scratch), trial, str(projection.key(bucket)))


def _cache_path(device: torch.device, dtype: torch.dtype) -> Path:
    # Algorithms are one version's of cuBLASLt.
    what = (_FORMAT, BUCKETS, GEMV_CANDIDATES, SKINNY_CANDIDATES, FLOAT8_CANDIDATES)
    return tuned_path("linear", device, str(cublaslt.version()), str(dtype), repr(what))


def _read(path: Path) -> dict[Key, Choice]:
    """Nothing of a file that is not as `_write` leaves it."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())
        return {
            (str(e["format"]), int(e["tokens"]), int(e["n"]), int(e["k"]), bool(e["silu"])): Choice(
                gemv=GemvConfig(**e["gemv"]) if e["gemv"] else None,
                skinny=SkinnyConfig(**e["skinny"]) if e["skinny"] else None,
                cublaslt=CublasLtConfig(bytes.fromhex(e["cublaslt"])) if e["cublaslt"] else None,
                deferred=bool(e["deferred"]),
                scaled=bool(e["scaled"]),
            )
            for e in entries
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, known: dict[Key, Choice]) -> None:
    entries = [
        {
            "format": kind,
            "tokens": tokens,
            "n": n,
            "k": k,
            "silu": silu,
            "gemv": asdict(choice.gemv) if choice.gemv else None,
            "skinny": asdict(choice.skinny) if choice.skinny else None,
            "cublaslt": choice.cublaslt.algorithm.hex() if choice.cublaslt else None,
            "deferred": choice.deferred,
            "scaled": choice.scaled,
        }
        for (kind, tokens, n, k, silu), choice in sorted(known.items())
    ]
    keep(path, entries)
