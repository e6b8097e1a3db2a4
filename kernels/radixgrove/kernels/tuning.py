"""Which kernel multiplies: measured on the device while the engine warms up, and kept on disk."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixgrove.kernels._triton import next_power_of_2
from radixgrove.kernels.linear import (
    MAX_SKINNY_TOKENS,
    GemvConfig,
    SkinnyConfig,
    SkinnyWorkspace,
    gemv,
    skinny,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one shape; cuBLAS when neither is set."""

    gemv: GemvConfig | None = None
    skinny: SkinnyConfig | None = None


CUBLAS = Choice()
GEMV_CANDIDATES = (
    Choice(gemv=GemvConfig(rows=2, block_k=1024, warps=4)),
    Choice(gemv=GemvConfig(rows=4, block_k=512, warps=4)),
    Choice(gemv=GemvConfig(rows=4, block_k=1024, warps=4)),
    Choice(gemv=GemvConfig(rows=8, block_k=512, warps=4)),
)
SKINNY_CANDIDATES = tuple(
    Choice(skinny=SkinnyConfig(block_n=block_n, block_k=block_k, splits=splits, stages=stages))
    for block_n, block_k, stages, ways in (
        (64, 128, 4, (1, 2, 4)),
        (128, 64, 4, (1, 4)),
        (64, 64, 6, (1, 2, 4)),
        (128, 128, 3, (2, 4)),  # reads the tokens half as often as 64 rows do
        (32, 128, 4, (1,)),  # enough tiles without splitting
    )
    for splits in ways
)
# A kernel has to win by this much, so that noise does not choose.
MARGIN = 0.97
_Key = tuple[int, int, int, bool]  # token bucket, N, K, silu
_Shape = tuple[torch.dtype, _Key]


def cache_directory() -> Path:
    """`$RADIXGROVE_CACHE_DIR`, else `$XDG_CACHE_HOME/radixgrove`, else `~/.cache/radixgrove`."""
    if explicit := os.environ.get("RADIXGROVE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixgrove"


class LinearTuner:
    """Chooses a kernel by token count and weight shape.

    Untuned shapes take `gemv` for one token (its fusions save launches) and cuBLAS otherwise.
    """

    def __init__(self) -> None:
        self._choices: dict[_Shape, Choice] = {}
        self._workspaces: dict[torch.device, SkinnyWorkspace] = {}

    def choose(self, tokens: int, weight: Tensor, *, silu: bool) -> Choice:
        """The kernel for `tokens` rows; float32 always takes cuBLAS past one token."""
        if tokens > MAX_SKINNY_TOKENS:
            return CUBLAS
        rows, columns = weight.shape
        default = GEMV_CANDIDATES[2] if tokens == 1 else CUBLAS
        key = (_bucket(tokens), rows, columns, silu)
        return self._choices.get((weight.dtype, key), default)

    def workspace(self, device: torch.device) -> SkinnyWorkspace:
        """Scratch of split products; made on first use, which must be outside graph capture."""
        if device not in self._workspaces:
            self._workspaces[device] = SkinnyWorkspace(device)
        return self._workspaces[device]

    def tune(
        self,
        layers: Sequence[tuple[Sequence[Tensor], bool]],
        batches: Iterable[int],
        report: Callable[[str, float], None] = lambda message, fraction: None,
    ) -> None:
        """Measure every candidate on the model's own weights, or read an earlier measurement.

        Args:
            layers: for each kind of projection its weights (several layers', so that the L2
                cache does not hold them) and whether it ends in SiLU-and-multiply.
            batches: token counts of the decode graphs.
            report: called with a message and the fraction done.
        """
        buckets = sorted({_bucket(b) for b in batches if 1 <= b <= MAX_SKINNY_TOKENS})
        todo = [(bucket, weights, silu) for bucket in buckets for weights, silu in layers]
        if not todo or not todo[0][1][0].is_cuda or todo[0][1][0].dtype == torch.float32:
            return
        device, dtype = todo[0][1][0].device, todo[0][1][0].dtype
        self.workspace(device)
        path = _cache_path(device, dtype)
        known = _read(path)
        for done, (bucket, weights, silu) in enumerate(todo):
            key: _Key = (bucket, weights[0].shape[0], weights[0].shape[1], silu)
            if key not in known:
                report(f"tuning {key[1]}x{key[2]} for {bucket} tokens", done / len(todo))
                known[key] = self._fastest(bucket, weights, silu)
            self._choices[dtype, key] = known[key]
        _write(path, known)

    def _fastest(self, tokens: int, weights: Sequence[Tensor], silu: bool) -> Choice:
        x = torch.randn(tokens, weights[0].shape[1], device=weights[0].device).to(weights[0].dtype)
        candidates = GEMV_CANDIDATES if tokens == 1 else SKINNY_CANDIDATES
        best, best_time = CUBLAS, MARGIN * self._time(CUBLAS, x, weights, silu)
        if tokens == 1:
            best_time /= MARGIN * MARGIN  # the norm and the endings that gemv saves are not timed
        for candidate in candidates:
            if candidate.skinny is not None and not self.workspace(x.device).fits(
                candidate.skinny, tokens, weights[0].shape[0] // (2 if silu else 1), silu
            ):
                continue
            try:
                elapsed = self._time(candidate, x, weights, silu)
            except Exception:  # a config that this device or Triton cannot build is just not chosen
                log.debug("linear candidate %s failed", candidate, exc_info=True)
                continue
            if elapsed < best_time:
                best, best_time = candidate, elapsed
        return best

    def _time(self, choice: Choice, x: Tensor, weights: Sequence[Tensor], silu: bool) -> float:
        """Milliseconds of one pass over all weights."""

        def run() -> None:
            for weight in weights:
                if choice.gemv is not None:
                    gemv(x, weight, silu=silu, config=choice.gemv)
                elif choice.skinny is not None:
                    workspace = self.workspace(x.device)
                    skinny(x, weight, silu=silu, config=choice.skinny, workspace=workspace)
                else:
                    y = torch.nn.functional.linear(x, weight)
                    if silu:
                        torch.nn.functional.silu(y)  # about what the separate kernel costs

        return milliseconds(run, x.device)


def milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """Of `run` as a CUDA graph, the best of five."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # A collection meanwhile might free CUDA memory; `torch.cuda.graph` would make one each time.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            # Other threads (NCCL's watchdog) may call into CUDA.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = _timing_event(), _timing_event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _bucket(tokens: int) -> int:
    return 1 if tokens == 1 else max(16, next_power_of_2(tokens))


def _cache_path(device: torch.device, dtype: torch.dtype) -> Path:
    import triton

    identity = "|".join(
        (
            torch.cuda.get_device_name(device),
            torch.__version__,
            triton.__version__,
            str(dtype),
            repr(GEMV_CANDIDATES + SKINNY_CANDIDATES),
        )
    )
    name = blake2b(identity.encode(), digest_size=8).hexdigest()
    return cache_directory() / f"linear-{name}.json"


def _read(path: Path) -> dict[_Key, Choice]:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())
        return {
            (int(e["tokens"]), int(e["n"]), int(e["k"]), bool(e["silu"])): Choice(
                gemv=GemvConfig(**e["gemv"]) if e["gemv"] else None,
                skinny=SkinnyConfig(**e["skinny"]) if e["skinny"] else None,
            )
            for e in entries
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, known: dict[_Key, Choice]) -> None:
    entries = [
        {
            "tokens": tokens,
            "n": n,
            "k": k,
            "silu": silu,
            "gemv": asdict(choice.gemv) if choice.gemv else None,
            "skinny": asdict(choice.skinny) if choice.skinny else None,
        }
        for (tokens, n, k, silu), choice in sorted(known.items())
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("cannot keep the tuning of linear layers: %s", error.strerror)
