"""FlashInfer's prefill kernels, compiled before a worker starts: named, made and put in place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from radixgrove.worker.attention import flashinfer_kernels as kernels
from radixgrove.worker.attention.flashinfer_kernels import PrefillKernel, Toolkit

# What FlashInfer 0.6.13 called the library that it compiled for Llama-3.1-8B on an H200.
COMPILED_ON_AN_H200 = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
    "head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
)
# Stands for FlashInfer where that is not installed: "compiles" what it would have asked nvcc for.
_STAND_IN = """
import os, pathlib

WORK = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"])


class Spec:
    def __init__(self, generation, dtype, *rest):
        self.sources = ["one.cu", "two.cu"]
        self.name = f"{generation}-{dtype}-{rest[3]}"
        self.jit_library_path = WORK / self.name
        self.aot_path = pathlib.Path(__file__).parent / "data" / "aot" / self.name


class jit:
    gen_batch_prefill_module = Spec

    def build_jit_specs(specs, skip_prebuilt):
        names = "FLASHINFER_CUDA_ARCH_LIST", "CUDA_HOME", "MAX_JOBS"
        for spec in specs:
            spec.jit_library_path.write_text(" ".join(os.environ[name] for name in names))
"""


def test_a_library_has_flashinfers_name() -> None:
    assert PrefillKernel("fa3", "bfloat16", 128).name == COMPILED_ON_AN_H200


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_names_and_places_are_those_that_a_worker_asks_for(tmp_path: Path) -> None:
    program = """
import json
from radixgrove.worker.attention import flashinfer_kernels as kernels
wanted = kernels.kernels_for(["8.9", "9.0a"], list(kernels.DTYPES), kernels.HEAD_DIMS)
specs = [kernels.specification(kernel) for kernel in wanted]
print(json.dumps([[k.name, s.name, str(kernels._prebuilt_folder() / k.name / f"{k.name}.so"),
                   str(s.aot_path)] for k, s in zip(wanted, specs, strict=True)]))
"""
    environ = {
        **os.environ,
        "FLASHINFER_CUDA_ARCH_LIST": "8.9 9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == 2 * len(kernels.DTYPES) * len(kernels.HEAD_DIMS)
    for name, theirs, place, their_place in rows:
        assert (name, place) == (theirs, their_place)


def test_hopper_has_kernels_of_its_own() -> None:
    wanted = kernels.kernels_for(["8.0", "9.0a", "8.9"], ["bfloat16"], [64])
    assert [str(kernel) for kernel in wanted] == [
        "fa2, bfloat16, head dimension 64",
        "fa3, bfloat16, head dimension 64",
    ]
    assert kernels.kernel_of(9, "bfloat16", 100) is None
    assert kernels.kernel_of(9, "float32", 128) is None


@pytest.mark.parametrize("name", ["7.5", "90", "hopper", "9.0a 8.9", ""])
def test_what_is_no_architecture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"9\.0a"):
        kernels.kernels_for([name], ["bfloat16"], [64])


def test_the_toolkit_is_that_of_the_environment_if_it_has_an_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert kernels.find_toolkit() is None
    nvcc.touch(mode=0o755)
    assert kernels.find_toolkit() == Toolkit(tmp_path / "cuda")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert kernels.find_toolkit() == Toolkit(tmp_path / "cuda")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_is_compiled_links_against_a_toolkit_of_wheels(tmp_path: Path) -> None:
    def link(*arguments: str) -> int:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "kernel.so")]
        source = "int cudaGetDevice(int *); int f(void) { int x; return cudaGetDevice(&x); }"
        return subprocess.run(
            [*command, "-Wl,--no-undefined", *arguments, "-lcudart", "-lcuda"],
            input=source,
            text=True,
            capture_output=True,
            check=False,
        ).returncode

    wheels = tmp_path / "nvidia" / "cu13"
    (wheels / "lib").mkdir(parents=True)
    runtime = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcudart.so.13"]
    subprocess.run(
        [*runtime, "-o", str(wheels / "lib" / "libcudart.so.13")],
        input="int cudaGetDevice(int *x) { return *x = 0; }",
        text=True,
        check=True,
    )
    assert link(f"-L{wheels / 'lib'}") != 0
    assert link(Toolkit(wheels).link_flags(tmp_path / "links")) == 0


def test_a_machines_toolkit_needs_no_help(tmp_path: Path) -> None:
    for name in ("lib64/libcudart.so", "lib64/stubs/libcuda.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert Toolkit(tmp_path).link_flags(tmp_path / "links") == ""
    assert not (tmp_path / "links").exists()


def test_libraries_end_beside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_STAND_IN)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    options = ["--architecture=9.0a", "--architecture=8.9", "--head-dim=128", "--jobs=3"]
    result = subprocess.run(
        [sys.executable, "-m", "radixgrove.cli", "compile-kernels", *options],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path / "site"),
            "CUDA_HOME": str(tmp_path / "cuda"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    made = {path.name: path.read_text() for path in (package / "data" / "aot").iterdir()}
    # One library of all cards but Hopper's is for these alone: Hopper's has an own name.
    said = f"8.9 {tmp_path / 'cuda'} 3"
    assert made == {"fa3-torch.bfloat16-128": said, "fa2-torch.bfloat16-128": said}
    assert str(package / "data" / "aot" / "fa3-torch.bfloat16-128") in result.stdout
