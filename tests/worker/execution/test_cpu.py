"""What the CPU does its own way: norms of few and many rows, what its processor can multiply, and
where its weights lie."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.worker.models.hugepages import use_huge_pages
from radixgrove.worker.models.ops import TorchOps

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _gives_huge_pages() -> bool:
    """At once, that is, which Linux does since 6.1."""
    if sys.platform != "linux" or not _THP.exists() or "[never]" in _THP.read_text():
        return False
    return tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)


@pytest.mark.parametrize("shape", [(1, 576), (14, 576), (15, 576), (300, 576), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_rms_norm(shape: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * size + size  # a mean far from 0
    weight = torch.randn(shape[-1], generator=generator)
    kept = x.clone()
    exact = rms_norm_reference(x.double(), weight.double(), 1e-5).float()
    torch.testing.assert_close(TorchOps().rms_norm(x, weight, 1e-5), exact)
    assert torch.equal(x, kept)
    rounded = x.bfloat16()
    exact = rms_norm_reference(rounded.double(), weight.bfloat16().double(), 1e-5).bfloat16()
    result = TorchOps().rms_norm(rounded, weight.bfloat16(), 1e-5)
    torch.testing.assert_close(result, exact, rtol=2**-7, atol=0)


_PRODUCTS = """
import torch
from radixgrove.kernels.weight import Weight
from radixgrove.worker.models.ops import choose_ops

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    ops = choose_ops(torch.device("cpu"), dtype)
    x = torch.ones(3, 64, dtype=dtype)
    weight = ops.prepare(Weight.plain(torch.eye(64, dtype=dtype)))
    y = ops.linear(x, weight, None, norm=None, eps=0.0, silu=False, residual=None)
    assert torch.equal(y, x)
    print(type(ops).__name__)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_a_processor_without_a_dtype_takes_the_plain_path_and_says_so() -> None:
    plain = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", _PRODUCTS]
    done = subprocess.run(command, env=os.environ | plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CpuOps", "TorchOps", "TorchOps"]
    said = [line for line in done.stderr.splitlines() if "plain path" in line]
    assert [line.split(":")[0] for line in said] == [
        "this processor has no fast bfloat16",
        "this processor has no fast float16",
    ]


def _advised_bytes(tensor: torch.Tensor) -> int:
    """Of the tensor, in mappings that are to have huge pages; the kernel gives what it has."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            inside = max(0, min(high, end) - max(low, begin))
        elif first == "VmFlags:" and "hg" in rest:
            found += inside
    return found


@pytest.mark.skipif(not _gives_huge_pages(), reason="no transparent huge pages")
def test_weights_move_to_huge_pages_and_stay_what_they_are() -> None:
    weight = torch.arange(4 << 20)  # 32 MiB
    kept = weight.clone()
    use_huge_pages([weight])
    assert torch.equal(weight, kept)
    # Everything but a block at each end, which may lie beside what is not mapped.
    assert _advised_bytes(weight) >= 28 << 20


def test_huge_pages_are_advice() -> None:
    use_huge_pages([torch.empty(0), torch.zeros(3)])
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.eye(64), None)
    use_huge_pages([packed])
    assert torch.equal(packed.to_dense(), torch.eye(64))
