"""Which kernel multiplies: measured on the device while the engine warms up, and kept on disk."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from radixgrove.kernels import cublaslt
from radixgrove.kernels._triton import cdiv, next_power_of_2
from radixgrove.kernels.cublaslt import CublasLtConfig
from radixgrove.kernels.gemv import GemvConfig
from radixgrove.kernels.matmul import CUBLAS, Choice, Scratch, multiply
from radixgrove.kernels.norm import add_rms_norm, rms_norm
from radixgrove.kernels.scaled import (
    ends_in_parts,
    feed,
    library_takes,
    multiply_quantized,
    takes_quantized,
)
from radixgrove.kernels.skinny import MAX_SKINNY_TOKENS, SkinnyConfig, within
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

log = logging.getLogger(__name__)

# Token counts that are measured; others take the next larger one's choice.
BUCKETS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
# Past this many tokens an addition to the residual costs enough to ask who should do it.
_MANY_TOKENS = 256
# Up to 4,096 columns a step measured on an H200 for each product of two models: the best, or within
# 2 % of it. Rows of 4,096 columns are fastest whole, without a pipeline; so longer ones are tried.
GEMV_CANDIDATES = tuple(
    Choice(gemv=GemvConfig(rows=rows, block_k=block_k, warps=warps))
    for rows, block_k, warps in (
        (8, 512, 2),
        (8, 512, 4),
        (4, 1024, 4),
        (4, 2048, 4),
        (8, 1024, 4),
        (2, 4096, 4),
        (1, 16384, 8),
        (2, 16384, 8),
    )
)
# Every one is compiled for every ending and several token counts, so only what has won is here.
SKINNY_CANDIDATES = tuple(
    Choice(skinny=SkinnyConfig(block_n=64, block_k=block_k, splits=splits, stages=stages))
    for block_k, stages in ((128, 4), (64, 6))
    for splits in (4, 2, 1)
)
# Of weights in float8: steps of as many bytes, or more of them on their way. High tiles read x half
# as often, and may be a part of the next product's inputs, which is quantized at their end.
FLOAT8_CANDIDATES = tuple(
    Choice(
        skinny=SkinnyConfig(
            block_n=block_n, block_k=block_k, splits=splits, stages=stages, warps=warps
        )
    )
    for block_n, block_k, stages, warps in (
        (64, 256, 3, 4),
        (64, 256, 4, 4),
        (64, 128, 6, 4),
        (128, 128, 3, 8),
        (128, 128, 4, 4),
    )
    for splits in (4, 2, 1)
)
_HIGH_TILE_TOKENS = 64  # for whose sums a tile of 128 rows has registers
# What a block of compute capability 9.0 has, less some for what the compiler needs beside tiles.
_SHARED_MEMORY_BYTES = 225 << 10
SCALED = Choice(scaled=True)
# Up to this many tokens `skinny` may win with any ending, past it with SiLU-and-multiply only.
_SKINNY_WITHOUT_SILU = 64
_SKINNY_ONE_TILE = 32  # up to here the first tile that fits has always won
# A kernel has to win by this much, so that noise does not choose.
MARGIN = 0.985
# One much slower than the best is timed once only.
_HOPELESS = 1.3
_REPEATS = 4
_COLD_BYTES = 256 << 20  # of weights in a row, so that the L2 cache does not hold them
_FORMAT = 9  # of the file
_Key = tuple[str, int, int, int, bool]  # the weight's format, token bucket, N, K, silu
_Shape = tuple[torch.dtype, _Key]
C = TypeVar("C")
Timeable = TypeVar("Timeable", contravariant=True)


@dataclass(frozen=True, slots=True)
class Projection:
    """A kind of product of the model, as `ops.linear` is asked for it.

    `weights`: of several layers, the same shape. `every_token`: it multiplies all tokens of a
    prefill step, not only those that are sampled from. Without `residual` a norm precedes it.
    `wide`: its output is float32. `feeds`: with `silu`, the weight whose product takes the result.
    """

    weights: Sequence[Weight]
    silu: bool = False
    residual: bool = False
    biased: bool = False
    every_token: bool = True
    wide: bool = False
    feeds: Weight | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else self.weights[0].dtype

    @property
    def outputs(self) -> int:
        rows = self.weights[0].shape[0]
        return rows // 2 if self.silu else rows

    def key(self, bucket: int) -> _Key:
        weight = self.weights[0]
        return (weight.format, bucket, *weight.shape, self.silu)


def cache_directory() -> Path:
    """`$RADIXGROVE_CACHE_DIR`, else `$XDG_CACHE_HOME/radixgrove`, else `~/.cache/radixgrove`."""
    if explicit := os.environ.get("RADIXGROVE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixgrove"


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
            endings = projection.silu, projection.residual, projection.biased, projection.wide
            kind = projection.weights[0].format, next_power_of_2(bucket), endings
            for choice in own_candidates(bucket, projection, scratch):
                trial = _Trial(projection, bucket, scratch)
                jobs.setdefault((choice, kind), partial(trial.run_once, choice))
        # A compilation leaves Python for most of its time.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile-kernels") as executor:
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


def bucket_of(tokens: int) -> int:
    """The measured token count from which `tokens` take their choice."""
    return BUCKETS[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]


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


def own_candidates(bucket: int, projection: Projection, scratch: Scratch) -> list[Choice]:
    """Of our kernels, those worth timing for a shape."""
    if bucket == 1:
        widest = max(2048, next_power_of_2(projection.weights[0].shape[1]))
        return [one for one in GEMV_CANDIDATES if one.gemv and one.gemv.block_k <= widest]
    if bucket > MAX_SKINNY_TOKENS:
        return []
    fitting = partial(_fits, bucket=bucket, projection=projection, scratch=scratch)
    if projection.weights[0].quantized:
        return list(filter(fitting, FLOAT8_CANDIDATES))
    own = list(filter(fitting, SKINNY_CANDIDATES))
    if not projection.silu:
        return own[: bucket <= _SKINNY_WITHOUT_SILU]
    return own[:1] if bucket <= _SKINNY_ONE_TILE else own


def _fits(choice: Choice, bucket: int, projection: Projection, scratch: Scratch) -> bool:
    """Whether a `skinny` kernel has the memory that it needs, and the chip enough programs."""
    config = choice.skinny
    if config is None:
        return False
    if (block := projection.weights[0].block) and not within(config.block_k, block):
        return False
    if config.block_n > 64 and bucket > _HIGH_TILE_TOKENS:
        return False
    weight, feeds = projection.weights[0], projection.feeds
    silu, n = projection.silu, projection.outputs
    if feeds is not None and takes_quantized(bucket, feeds):
        silu = ends_in_parts(config, weight, feeds)
        n = n if silu else weight.shape[0]
    chip = torch.cuda.get_device_properties(weight.device)
    kept = weight.activations == Activations.KEPT or weight.payload.dtype == torch.int8
    item_bytes = weight.dtype.itemsize if kept else weight.payload.itemsize
    shared = config.shared_memory_bytes(bucket, item_bytes, silu=silu)
    splits = _splits(cdiv(n, config.block_n), chip.multi_processor_count)
    tried = (1, splits) if projection.silu or weight.quantized else (splits,)
    if weight.quantized:  # a multiprocessor has room for two programs of few stages
        tried = (*tried, 2 * splits)
    return (
        config.splits in tried
        and shared <= _SHARED_MEMORY_BYTES
        and scratch.skinny.fits(config, bucket, n, silu)
    )


def _splits(tiles: int, multiprocessors: int) -> int:
    """Of 1, 2 and 4 the largest with which every program has a multiprocessor of its own."""
    return next((ways for ways in (4, 2) if tiles * ways <= multiprocessors), 1)


def candidates(bucket: int, projection: Projection, scratch: Scratch) -> list[Choice]:
    """cuBLAS first, then all that may beat it."""
    weight, library = projection.weights[0], [CUBLAS]
    if weight.quantized and library_takes(weight):
        library.append(SCALED)
    by_algorithm = not weight.quantized or (SCALED in library and weight.block is None)
    if bucket > 1 and by_algorithm and not projection.biased and scratch.cublaslt is not None:
        try:
            found = scratch.cublaslt.candidates(bucket, weight.payload, projection.result_dtype)
            library += [Choice(cublaslt=config) for config in found]
        except cublaslt.CublasLtError as error:
            log.debug("no algorithms of cuBLASLt: %s", error)
    deferred = []
    if bucket > _MANY_TOKENS and projection.residual and not projection.biased:
        deferred = [replace(choice, deferred=True) for choice in library]
    return library + deferred + own_candidates(bucket, projection, scratch)


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
        cold = 2 if tokens > _MANY_TOKENS else cdiv(_COLD_BYTES, weight.nbytes)
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
        if projection.wide:
            wide = torch.empty(len(x), projection.outputs, device=self.device)
            product(norm=of_inputs, out=wide)
        elif not projection.residual:
            product(norm=of_inputs, silu=projection.silu)
        elif choice.deferred:
            add_rms_norm(product(), residual, of_outputs, 1e-6)
        else:
            product(residual=residual)
            if self._tokens > _MANY_TOKENS:
                rms_norm(residual, of_outputs, 1e-6)


class Trial(Protocol[Timeable]):
    """What is timed: the same work in the way of a choice."""

    @property
    def device(self) -> torch.device: ...

    def run(self, choice: Timeable) -> None:
        """On cold weights, several times over."""

    def run_once(self, choice: Timeable) -> None:
        """Enough to compile and to load."""


@dataclass(slots=True)
class _Timed(Generic[C]):
    choice: C
    graph: torch.cuda.CUDAGraph
    milliseconds: float


def _fastest(bucket: int, projection: Projection, scratch: Scratch) -> Choice:
    trial = _Trial(projection, bucket, scratch)
    return fastest(candidates(bucket, projection, scratch), trial, str(projection.key(bucket)))


def fastest(choices: Sequence[C], trial: Trial[C], what: str) -> C:
    """The one that takes the least time, or the first, if none is clearly better.

    Args:
        choices: of which the first must work; another that fails is left out.
        what: is chosen for, for the log.
    """
    timed = _time(choices, trial, torch.cuda.graph_pool_handle())
    first = timed[0]
    limit = _HOPELESS * min(one.milliseconds for one in timed)
    timed = [one for one in timed if one.milliseconds <= limit or one is first]
    _repeat(timed, trial.device)
    best = min(timed, key=lambda one: one.milliseconds)
    if best.milliseconds >= MARGIN * first.milliseconds:
        best = first
    log.debug(
        "%s: %.4f ms by %s, %.4f by %s",
        what,
        best.milliseconds,
        best.choice,
        first.milliseconds,
        first.choice,
    )
    return best.choice


def _time(choices: Sequence[C], trial: Trial[C], pool: _POOL_HANDLE) -> list[_Timed[C]]:
    """Each once; one that this device or Triton cannot build is just not chosen."""
    timed: list[_Timed[C]] = []
    for choice in choices:
        try:
            steps = partial(trial.run_once, choice), partial(trial.run, choice)
            graph = _record(*steps, trial.device, pool)
        except Exception:
            if not timed:
                raise
            log.debug("candidate %s failed", choice, exc_info=True)
            continue
        graph.replay()
        timed.append(_Timed(choice, graph, _replay(graph)))
    return timed


def _repeat(timed: Sequence[_Timed[C]], device: torch.device) -> None:
    """Time all in turn, so that they see the same clocks, and without a gap in between."""
    events = []
    for one in (*timed,) * _REPEATS:
        begin, end = _timing_event(), _timing_event()
        begin.record()
        one.graph.replay()
        end.record()
        events.append((one, begin, end))
    torch.cuda.synchronize(device)
    for one, begin, end in events:
        one.milliseconds = min(one.milliseconds, begin.elapsed_time(end))


@lru_cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record(
    warm_up: Callable[[], None],
    run: Callable[[], None],
    device: torch.device,
    pool: _POOL_HANDLE,
) -> torch.cuda.CUDAGraph:
    """`run` as a graph, after `warm_up`, in which kernels compile and libraries allocate.

    Graphs of one `pool` share their memory.
    """
    stream = _recording_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # A collection meanwhile might free CUDA memory; `torch.cuda.graph` would make one each time.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            # Other threads (NCCL's watchdog) may call into CUDA.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    begin, end = _timing_event(), _timing_event()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cache_path(device: torch.device, dtype: torch.dtype) -> Path:
    # Algorithms are one version's of cuBLASLt.
    what = (_FORMAT, BUCKETS, GEMV_CANDIDATES, SKINNY_CANDIDATES, FLOAT8_CANDIDATES)
    return tuned_path("linear", device, str(cublaslt.version()), str(dtype), repr(what))


def tuned_path(kind: str, device: torch.device, *identity: str) -> Path:
    """Where choices are kept that were measured on such a device, with these versions."""
    import triton

    parts = torch.cuda.get_device_name(device), torch.__version__, triton.__version__, *identity
    name = blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
    return cache_directory() / f"{kind}-{name}.json"


def _read(path: Path) -> dict[_Key, Choice]:
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


def _write(path: Path, known: dict[_Key, Choice]) -> None:
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


def keep(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the file of `tuned_path`, whole or not at all; a failure is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("cannot keep what was tuned: %s", error.strerror)
