"""`radixgrove doctor` finds what is wrong and tells no secret."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from radixgrove.worker.attention.flashinfer_kernels import PrefillKernel
from tests.checkout import ROOT
from tests.cli.test_command import radixgrove
from tests.conftest import RedisServer
from tests.protocol.text.tokenizers_of_tests import llama_like


def findings(*arguments: str, **environ: str) -> tuple[int, list[dict[str, Any]]]:
    result = radixgrove("doctor", "--json", *arguments, **environ)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()]


def about(subject: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in found if finding["subject"] == subject]


def test_versions_machine_and_settings_are_reported() -> None:
    code, found = findings()
    assert code == 0
    assert "torch" in about("libraries", found)[0]["text"]
    assert about("worker", found)[0]["text"] == "all settings at their defaults"


def test_the_backend_that_auto_takes_is_named() -> None:
    _, found = findings(RADIXGROVE_DEVICE="cpu")
    said = about("backend", found)[0]["text"]
    assert re.match(
        r"attention auto: torch here, (flashinfer|triton|torch) on a GPU \(\w.+\)$", said
    )


@dataclass(frozen=True)
class Machine:
    """A machine with an H200, as far as doctor looks: programs and packages below a folder."""

    folder: Path

    def backend(self, **settings: str) -> dict[str, Any]:
        """What is found of the backend for Llama-3.1-8B."""
        environ = {
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(self.folder / "site"),
            "CUDA_HOME": str(self.folder / "cuda"),
            "RADIXGROVE_MODEL": str(ROOT / "benchmarks" / "configs" / "llama-3.1-8b"),
        }
        _, found = findings(**environ | settings)
        return about("backend", found)[0]

    def install_flashinfer(self, *kernels: PrefillKernel) -> None:
        package = self.folder / "site" / "flashinfer"
        (package / "data" / "aot").mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('doctor only looks for it')\n")
        for kernel in kernels:
            library = package / "data" / "aot" / kernel.name / f"{kernel.name}.so"
            library.parent.mkdir()
            library.touch()

    def install_nvcc(self) -> None:
        nvcc = self.folder / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch()


@pytest.fixture
def hopper(tmp_path: Path) -> Machine:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 0 MiB, 580.95.05, 9.0'\n")
    smi.chmod(0o755)
    return Machine(tmp_path)


KERNEL = PrefillKernel("fa3", "bfloat16", 128)


def test_kernels_that_are_compiled_are_what_runs(hopper: Machine) -> None:
    hopper.install_flashinfer(KERNEL)
    found = hopper.backend()
    assert found["verdict"] == "ok"
    assert (
        "auto: flashinfer (compiled before the start: fa3, bfloat16, head dimension 128"
        in (found["text"])
    )
    assert (
        "as set; auto takes flashinfer"
        in hopper.backend(RADIXGROVE_ATTENTION_BACKEND="triton")["text"]
    )


def test_kernels_of_other_models_and_cards_are_not_these(hopper: Machine) -> None:
    hopper.install_flashinfer(
        PrefillKernel("fa3", "bfloat16", 64),
        PrefillKernel("fa3", "float16", 128),
        PrefillKernel("fa2", "bfloat16", 128),
    )
    assert (
        "no FlashInfer kernel is compiled (fa3, bfloat16, head dimension 128)"
        in (hopper.backend()["text"])
    )


def test_a_toolkit_compiles_at_the_first_start(hopper: Machine) -> None:
    hopper.install_flashinfer()
    hopper.install_nvcc()
    found = hopper.backend()
    assert found["verdict"] == "ok"
    assert f"by the nvcc of {hopper.folder / 'cuda'}" in found["text"]
    assert "`radixgrove compile-kernels` compiles it, without a GPU" in found["text"]


def test_neither_kernels_nor_a_toolkit_is_a_warning_with_the_way_out(hopper: Machine) -> None:
    hopper.install_flashinfer()
    found = hopper.backend()
    assert found["verdict"] == "warn"
    assert "auto: triton (no FlashInfer kernel is compiled" in found["text"]
    assert "FlashInfer computes 1.15 times Triton's tokens" in found["text"]
    assert "`radixgrove compile-kernels` compiles it, without a GPU" in found["text"]
    found = hopper.backend(RADIXGROVE_ATTENTION_BACKEND="flashinfer")
    assert found["verdict"] == "FAIL"


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_an_absent_flashinfer_is_a_warning_with_the_way_out(hopper: Machine) -> None:
    hopper.install_nvcc()
    found = hopper.backend()
    assert found["verdict"] == "warn"
    assert (
        "auto: triton (FlashInfer is not installed: pip install 'radixgrove[cuda]'"
        in (found["text"])
    )


def test_a_model_that_flashinfer_cannot_serve_runs_on_triton_unwarned(hopper: Machine) -> None:
    hopper.install_flashinfer(KERNEL)
    for settings, reason in (
        ({"RADIXGROVE_KV_DTYPE": "fp8_e4m3"}, "FlashInfer does not read KV in float8"),
        ({"RADIXGROVE_DTYPE": "float32"}, "no kernels for float32 of head dimension 128"),
    ):
        found = hopper.backend(**settings)
        assert found["verdict"] == "ok"
        assert found["text"].startswith("attention auto: triton (")
        assert reason in found["text"]
        assert "times" not in found["text"], "there is nothing to gain"


def test_layers_that_all_have_a_window_run_on_triton_unwarned(
    hopper: Machine, tmp_path: Path
) -> None:
    hopper.install_flashinfer(KERNEL)
    llama = ROOT / "benchmarks" / "configs" / "llama-3.1-8b" / "config.json"
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(llama.read_bytes()) | mistral))
    found = hopper.backend(RADIXGROVE_MODEL=str(tmp_path))
    assert found["verdict"] == "ok"
    assert "attention auto: triton (all layers have a window" in found["text"]
    found = hopper.backend(
        RADIXGROVE_MODEL=str(tmp_path), RADIXGROVE_ATTENTION_BACKEND="flashinfer"
    )
    assert found["verdict"] == "ok"
    assert "triton, though flashinfer is set: all layers have a window" in found["text"]


def test_attention_with_sinks_runs_on_triton_unwarned(hopper: Machine, tmp_path: Path) -> None:
    hopper.install_flashinfer(KERNEL)
    llama = ROOT / "benchmarks" / "configs" / "llama-3.1-8b" / "config.json"
    gpt_oss = {"architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(llama.read_bytes()) | gpt_oss))
    found = hopper.backend(RADIXGROVE_MODEL=str(tmp_path))
    assert found["verdict"] == "ok"
    assert "attention auto: triton (attention has sinks" in found["text"]
    found = hopper.backend(
        RADIXGROVE_MODEL=str(tmp_path), RADIXGROVE_ATTENTION_BACKEND="flashinfer"
    )
    assert found["verdict"] == "ok"
    assert "triton, though flashinfer is set: attention has sinks" in found["text"]


def test_a_good_redis_passes(redis_server: RedisServer) -> None:
    code, found = findings(RADIXGROVE_REDIS_URL=redis_server.url)
    assert code == 0
    assert "version" in about("redis", found)[0]["text"]


def test_an_evicting_redis_fails(redis_server: RedisServer) -> None:
    with socket.create_connection(("127.0.0.1", redis_server.port)) as connection:
        connection.sendall(b"CONFIG SET maxmemory-policy allkeys-lru\r\n")
        assert connection.recv(16).startswith(b"+OK")
    code, found = findings(RADIXGROVE_REDIS_URL=redis_server.url)
    assert code == 1
    assert "needs noeviction" in about("redis", found)[-1]["text"]


def test_an_absent_redis_fails_without_its_password(free_port: int) -> None:
    url = f"redis://:hush@127.0.0.1:{free_port}/0"
    code, found = findings(RADIXGROVE_REDIS_URL=url)
    assert code == 1
    assert about("redis", found)[0]["verdict"] == "FAIL"
    assert "hush" not in json.dumps(found)


def test_a_taken_port_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = findings(RADIXGROVE_PORT=str(port))
    assert code == 0
    verdicts = {f["verdict"] for f in about("port", found) if f":{port}:" in f["text"]}
    assert verdicts == {"warn"}


def test_a_host_cache_is_held_against_the_memory_there_is() -> None:
    code, found = findings(RADIXGROVE_HOST_CACHE_GIB="0.001")
    assert code == 0
    assert about("host cache", found)[0]["verdict"] == "ok"
    code, found = findings(RADIXGROVE_HOST_CACHE_GIB="60000")
    assert code == 1
    assert about("host cache", found)[0]["verdict"] == "FAIL"
    assert "lower host_cache_gib" in about("host cache", found)[0]["text"]
    assert not about("host cache", findings()[1])


def test_a_directory_without_a_model_fails(tmp_path: Path) -> None:
    code, found = findings(RADIXGROVE_MODEL=str(tmp_path))
    assert code == 1
    assert "lacks config.json, tokenizer.json" in about("model", found)[0]["text"]


def test_how_the_output_is_read_is_named(tmp_path: Path) -> None:
    for name, content in llama_like("{{ tools }}<tool_call></think>").contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    for wanted, text in (
        ("auto", "hermes (reasoning in <think>)"),
        ("glm", "glm (reasoning in <think>)"),
        ("none", "none (no reasoning): requests with tools are refused"),
    ):
        environ = {"RADIXGROVE_MODEL": str(tmp_path), "RADIXGROVE_OUTPUT_FORMAT": wanted}
        assert about("output", findings(**environ)[1])[0]["text"] == text
    _, found = findings(RADIXGROVE_MODEL=str(tmp_path), RADIXGROVE_OUTPUT_FORMAT="homer")
    assert about("output", found)[0]["verdict"] == "FAIL"


def test_cuda_on_a_machine_without_one_fails() -> None:
    code, found = findings(RADIXGROVE_DEVICE="cuda", PATH="/nonexistent")
    assert code == 1
    assert about("gpu", found)[0]["verdict"] == "FAIL"
