"""FlashInfer's prefill kernels: which are compiled, with what, and compiling them without a GPU.

FlashInfer takes a library that lies beside its package as it is ("ahead of time"), and compiles any
other when it is first used, with the nvcc of a CUDA toolkit. What is asked here about either
imports neither torch nor FlashInfer, so that `radixgrove doctor` can ask.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from radixgrove.protocol.errors import LibraryError

HEAD_DIMS = (64, 128, 256)  # those of Hopper's kernels
ARCHITECTURES = ("9.0a",)
DTYPES = {"bfloat16": "bf16", "float16": "f16"}  # as FlashInfer abbreviates them
# The nvcc of the CUDA that torch 2.11 brings; requirements/nvcc.txt locks the same.
TOOLKIT_WHEELS = "cuda-toolkit[crt,cudart,curand,nvcc,nvvm]==13.0.2"

_ARCHITECTURE = re.compile(r"(\d+)\.\d[a-z]?")
_LEAST_MAJOR = 8
_POLL_SECONDS = 2.0
Report = Callable[[str], None]


class FlashInferUnavailable(LibraryError, RuntimeError):
    """FlashInfer cannot serve here; the message says why in a line for people."""


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """What one library holds: prefill, paged and ragged, of a dtype and a head dimension."""

    generation: str  # "fa3" on Hopper, "fa2" on all others
    dtype: str  # "bfloat16" or "float16"
    head_dim: int

    @property
    def name(self) -> str:
        """The library's, as FlashInfer makes it: without position encoding, window or soft cap."""
        dtype, dim = DTYPES[self.dtype], self.head_dim
        name = (
            f"batch_prefill_with_kv_cache_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}"
            f"_dtype_idx_i32_head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0_use_swa_False"
            "_use_logits_cap_False_f16qk_False"
        )
        return f"{name}_sm90" if self.generation == "fa3" else name

    def __str__(self) -> str:
        return f"{self.generation}, {self.dtype}, head dimension {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit: a machine's, or what the wheels `nvidia-cuda-nvcc` and others unpack."""

    home: Path

    def link_flags(self, folder: Path) -> str:
        """Flags with which the linker finds both CUDA libraries; `folder` may be written into.

        Wheels have no `libcudart.so` without a number and no stub of the driver. A text file is a
        script to the linker: one names the library that is there, the other nothing, since the
        kernels look the driver's functions up when they run.
        """
        scripts = {}
        if not (self.home / "lib64" / "libcudart.so").exists():
            numbered = sorted((self.home / "lib").glob("libcudart.so.*"))
            if numbered:
                scripts["libcudart.so"] = f"INPUT({numbered[-1]})\n"
        if not (self.home / "lib64" / "stubs" / "libcuda.so").exists():
            scripts["libcuda.so"] = "/* opened at run time */\n"
        for name, text in scripts.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return f"-L{folder}" if scripts else ""


def generation_of(major: int) -> str:
    """Which kernels a GPU of compute capability `major` runs."""
    return "fa3" if major == 9 else "fa2"


def kernel_of(major: int, dtype: str, head_dim: int) -> PrefillKernel | None:
    """The one for a model on a GPU of that compute capability; None: there is none."""
    if dtype not in DTYPES or head_dim not in HEAD_DIMS:
        return None
    return PrefillKernel(generation_of(major), dtype, head_dim)


def find_toolkit() -> Toolkit | None:
    """The toolkit that FlashInfer would compile with, where it has an nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        nvcc = shutil.which("nvcc")
        home = str(Path(nvcc).parents[1]) if nvcc is not None else "/usr/local/cuda"
    return Toolkit(Path(home)) if (Path(home) / "bin" / "nvcc").is_file() else None


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


def prebuilt_library(kernel: PrefillKernel) -> Path | None:
    """The library beside FlashInfer's package, which a worker takes as it is."""
    path = _prebuilt_folder() / kernel.name / f"{kernel.name}.so"
    return path if path.is_file() else None


def can_serve(kernel: PrefillKernel) -> bool:
    """Whether FlashInfer has this kernel, or could compile it."""
    return is_installed() and (prebuilt_library(kernel) is not None or find_toolkit() is not None)


def _prebuilt_folder() -> Path:
    """Where FlashInfer looks, of its own package or of its package of compiled kernels."""
    if find_spec("flashinfer_jit_cache") is not None:
        import flashinfer_jit_cache

        return Path(flashinfer_jit_cache.get_jit_cache_dir())
    package = find_spec("flashinfer")
    if package is None or not package.submodule_search_locations:
        return Path("/nonexistent")
    return Path(package.submodule_search_locations[0]) / "data" / "aot"


def import_flashinfer() -> ModuleType:
    """
    Raises:
        FlashInferUnavailable: it is absent, or its imports fail.
    """
    try:
        import flashinfer
    except Exception as error:  # its imports fail in many ways, not only ImportError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FlashInferUnavailable(f"FlashInfer cannot be imported: {reason[0]}") from error
    return flashinfer  # type: ignore[no-any-return]


def specification(kernel: PrefillKernel) -> Any:
    """FlashInfer's `JitSpec` of the kernel: the one that its wrappers ask for in a worker."""
    import torch

    flashinfer, dtype = import_flashinfer(), getattr(torch, kernel.dtype)
    no_position_encoding = 0
    return flashinfer.jit.gen_batch_prefill_module(
        kernel.generation,
        dtype,
        dtype,
        dtype,
        torch.int32,
        kernel.head_dim,
        kernel.head_dim,
        no_position_encoding,
        False,  # sliding window
        False,  # soft cap
        False,  # fp16 reduction
    )


@contextmanager
def compiling(toolkit: Toolkit, links: Path) -> Iterator[None]:
    """The environment in which FlashInfer compiles; `links` may be written into."""
    flags = [os.environ.get("FLASHINFER_EXTRA_LDFLAGS", ""), toolkit.link_flags(links)]
    # Its ninja is a script beside this interpreter, in a folder that need not be on the path.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    with _environment(
        {
            "CUDA_HOME": str(toolkit.home),
            "FLASHINFER_EXTRA_LDFLAGS": " ".join(filter(None, flags)),
            "PATH": os.pathsep.join(filter(None, path)),
        }
    ):
        yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wait_reporting(build: Callable[[], object], report: Callable[[float], None]) -> None:
    """Run `build`, which works in processes of its own, and report the seconds now and then."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(build)
        while wait((future,), timeout=_POLL_SECONDS).not_done:
            report(time.monotonic() - begin)
        future.result()


def kernels_for(
    architectures: Sequence[str], dtypes: Sequence[str], head_dims: Sequence[int]
) -> list[PrefillKernel]:
    """What GPUs of these architectures (`9.0a`) need.

    Raises:
        ValueError: one that is no architecture, or one without kernels.
    """
    generations = {generation_of(_major(name)): None for name in architectures}
    return [PrefillKernel(g, t, d) for g in generations for t in dtypes for d in head_dims]


def _major(architecture: str) -> int:
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None or int(match[1]) < _LEAST_MAJOR:
        raise ValueError(f"architecture {architecture}: 8.0, 8.6, 8.9, 9.0a, 10.0a and later exist")
    return int(match[1])


def compile_kernels(
    kernels: Sequence[PrefillKernel],
    architectures: Sequence[str],
    toolkit: Toolkit,
    jobs: int | None,
    report: Report,
) -> list[Path]:
    """Compile for architectures that need not be here, and put the libraries beside the package.

    To be called before anything has imported FlashInfer, which reads where to work and for what
    when it is imported. A library of `fa2` holds all architectures but Hopper's, under one name.

    Returns:
        Where the libraries are.

    Raises:
        FlashInferUnavailable: it cannot be imported.
        RuntimeError: compiling failed; the message ends with the compiler's.
        OSError: the package's folder cannot be written to.
    """
    others = [name for name in architectures if generation_of(_major(name)) != "fa3"]
    variables = {"FLASHINFER_CUDA_ARCH_LIST": " ".join(others or architectures)}
    if jobs is not None:
        variables["MAX_JOBS"] = str(jobs)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        variables["FLASHINFER_WORKSPACE_BASE"] = folder
        with _environment(variables), compiling(toolkit, scratch / "links"):
            specs = [specification(kernel) for kernel in kernels]
            sources = sum(len(spec.sources) for spec in specs)

            def progress(seconds: float) -> None:
                done = sum(1 for _ in scratch.rglob("*.o"))
                report(f"{done} of {sources} files after {seconds:.0f} s")

            build = import_flashinfer().jit.build_jit_specs
            wait_reporting(lambda: build(specs, skip_prebuilt=False), progress)
        return [_install(spec.jit_library_path, spec.aot_path) for spec in specs]


def _install(library: Path, place: Path) -> Path:
    """Whole or not at all: a worker may start meanwhile."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    shutil.copyfile(library, partial)
    partial.replace(place)
    return place
