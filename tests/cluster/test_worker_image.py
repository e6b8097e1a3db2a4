"""The worker's own image: gigabytes of CUDA torch, built for real and looked into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.cluster.harness import images
from tests.cluster.harness.images import Container, ImageError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    # Kernels of one head dimension alone: they take most of the build.
    arguments = {"BASE": images.base_image(), "KERNELS": "--head-dim 128"}
    name = "localhost/radixgrove/worker:built"
    with images.container_of(name, ROOT / "worker" / "Dockerfile", ROOT, arguments) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> dict[Path, str]:
    """The one directory that the worker's user may write to besides /tmp."""
    tmp_path.chmod(0o777)
    return {tmp_path: "/cache"}


def test_it_runs_as_a_numeric_user_that_can_change_nothing_in_the_image(
    container: Container, cache: dict[Path, str]
) -> None:
    assert container.config()["User"] == "10001:10001"
    assert container.run("id", "-u").strip() == "10001"
    with pytest.raises(ImageError):
        container.run("touch", "/opt/radixgrove/here", writable=cache)


def test_it_needs_no_writable_root(container: Container, cache: dict[Path, str]) -> None:
    with pytest.raises(ImageError, match="Read-only file system"):
        container.run("touch", "/var/tmp/here", writable=cache, read_only=True)
    program = "import radixgrove.worker.engine.executor, torch; print(torch.ones(2))"
    said = container.run("python", "-c", program, writable=cache, read_only=True)
    assert said == "tensor([1., 1.])\n"


def test_doctor_finds_the_compiled_prefill(container: Container, cache: dict[Path, str]) -> None:
    # It fails for want of a model: none is named, and the image cannot make the demo model.
    looks = ("sh", "-c", "radixgrove doctor || true")
    said = container.run(*looks, writable=cache, read_only=True)
    assert (
        "attention auto: torch here, flashinfer on a GPU (compiled before the start: "
        "fa3, bfloat16, head dimension 128)"
    ) in said


def test_a_worker_would_take_what_is_compiled(container: Container, cache: dict[Path, str]) -> None:
    program = (
        "from radixgrove.worker.attention import flashinfer_kernels as kernels\n"
        "for dim in (64, 128):\n"
        "    spec = kernels.specification(kernels.PrefillKernel('fa3', 'bfloat16', dim))\n"
        "    print(dim, spec.is_aot)\n"
    )
    hopper = "FLASHINFER_CUDA_ARCH_LIST=9.0a"  # where there is no GPU to ask
    command = ("env", hopper, "python", "-c", program)
    said = container.run(*command, writable=cache, read_only=True)
    assert said.splitlines()[-2:] == ["64 False", "128 True"]


def test_the_compiler_stays_behind(container: Container) -> None:
    assert "toolkit" not in container.run("ls", "/opt")


def test_triton_can_compile_into_the_cache(
    container: Container, cache: dict[Path, str], tmp_path: Path
) -> None:
    # What Triton compiles on the host at first use: a launcher in C, against Python's headers.
    program = (
        "from triton.runtime.build import compile_module_from_src as build\n"
        "source = '#include <Python.h>\\n'\n"
        'source += "static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, \\"probe\\", 0, -1, 0};'
        '\\n"\n'
        "source += 'PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&d); }\\n'\n"
        "print(build(source, 'probe').__name__)\n"
    )
    said = container.run("python3", "-c", program, writable=cache, read_only=True)
    assert said.strip() == "probe"
    assert list(tmp_path.rglob("*.so")), "nothing was compiled into the cache"
