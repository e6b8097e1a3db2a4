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

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from radixgrove.cli.commands.doctor import doctor
from radixgrove.worker.agent import demo_model
from radixgrove.worker.attention.flashinfer_kernels import PrefillKernel
from tests.checkout import ROOT
from tests.cli.test_command import radixgrove
from tests.conftest import RedisServer
from tests.protocol.text.tokenizers_of_tests import llama_like
from tests.worker.agent.conftest import TINY_CONFIG


def findings(*arguments: str, **environ: str) -> tuple[int, list[dict[str, Any]]]:
    result = radixgrove("doctor", "--json", *arguments, **environ)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()]


def found_here(**environ: str) -> tuple[int, list[dict[str, Any]]]:
    """As `findings`, in this process."""
    clean = {name: None for name in os.environ if name.startswith("RADIXGROVE_")}
    result = CliRunner().invoke(doctor, ["--json"], env=clean | environ, standalone_mode=False)
    assert isinstance(result.return_value, int), result.output
    return result.return_value, [json.loads(line) for line in result.stdout.splitlines()]


def about(subject: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in found if finding["subject"] == subject]


def test_versions_machine_and_settings_are_reported() -> None:
    code, found = found_here()
    assert code == 0
    assert "torch" in about("libraries", found)[0]["text"]
    assert about("worker", found)[0]["text"] == "all settings at their defaults"


def test_the_backend_that_auto_takes_is_named() -> None:
    _, found = found_here(RADIXGROVE_DEVICE="cpu")
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
    code, found = found_here(RADIXGROVE_REDIS_URL=redis_server.url)
    assert code == 0
    assert "version" in about("redis", found)[0]["text"]


def test_an_evicting_redis_fails(redis_server: RedisServer) -> None:
    with socket.create_connection(("127.0.0.1", redis_server.port)) as connection:
        connection.sendall(b"CONFIG SET maxmemory-policy allkeys-lru\r\n")
        assert connection.recv(16).startswith(b"+OK")
    code, found = found_here(RADIXGROVE_REDIS_URL=redis_server.url)
    assert code == 1
    assert "needs noeviction" in about("redis", found)[-1]["text"]


def test_an_absent_redis_fails_without_its_password(free_port: int) -> None:
    url = f"redis://:hush@127.0.0.1:{free_port}/0"
    code, found = found_here(RADIXGROVE_REDIS_URL=url)
    assert code == 1
    assert about("redis", found)[0]["verdict"] == "FAIL"
    assert "hush" not in json.dumps(found)


def test_a_taken_port_is_a_warning_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = found_here(RADIXGROVE_PORT=str(port))
    assert code == 0
    said = [finding for finding in about("port", found) if str(port) in finding["text"]]
    assert [finding["verdict"] for finding in said] == ["warn", "warn"]
    for part, finding in zip(("router", "worker"), said, strict=True):
        assert finding["text"].startswith(f"{part} cannot listen on 127.0.0.1 port {port}: ")
        assert "with --port" in finding["text"]


def test_an_address_of_another_machine_fails() -> None:
    code, found = found_here(RADIXGROVE_HOST="192.0.2.1")
    assert code == 1
    assert [f["verdict"] for f in about("port", found) if "192.0.2.1" in f["text"]] == ["FAIL"] * 2


def test_a_host_cache_is_held_against_the_memory_that_a_worker_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixgrove.worker.execution.host_room.free_memory", lambda: 100 << 30)
    for wanted, verdict, text in (
        ("0", "ok", "none; host_cache_gib may be up to 95.00 GiB"),
        ("94", "ok", "94 GiB of up to 95.00 GiB"),
        ("96", "FAIL", "lower host_cache_gib"),
    ):
        code, found = found_here(RADIXGROVE_HOST_CACHE_GIB=wanted)
        (said,) = about("host cache", found)
        assert (code, said["verdict"]) == (int(verdict == "FAIL"), verdict)
        assert text in said["text"]


@pytest.mark.parametrize(
    ("environ", "parts", "words"),
    [
        ({"API_KEYS_FILE": "/nope"}, ("router", "worker"), "API key file /nope cannot be read"),
        ({"MANAGEMENT_HOST": "0.0.0.0"}, ("router", "worker"), "set management_key"),
        ({"NODES": "2", "PP": "2"}, ("worker",), "needs --master"),
    ],
    ids=str,
)
def test_what_a_part_refuses_when_it_starts_fails(
    environ: dict[str, str], parts: tuple[str, ...], words: str
) -> None:
    code, found = found_here(**{f"RADIXGROVE_{name}": value for name, value in environ.items()})
    assert code == 1
    for part in parts:
        said = about(part, found)[0]
        assert said["verdict"] == "FAIL"
        assert words in said["text"]
        assert not [f for f in about("port", found) if f["text"].startswith(part)]


def test_a_launcher_of_groups_is_heeded() -> None:
    code, found = found_here(NNODES="2", NODE_RANK="1", RADIXGROVE_PP="2")
    assert code == 1
    assert "a group of 2 machines needs --master" in about("worker", found)[0]["text"]
    code, found = found_here(NNODES="two")
    assert code == 1
    assert "NNODES is 'two', which is no number of machines" in about("worker", found)[0]["text"]


def test_settings_that_a_worker_alone_refuses_are_a_finding() -> None:
    """The API's port, of routers and workers alike, is a worker's own for its management."""
    code, found = found_here(RADIXGROVE_PORT="8101")
    assert code == 1
    assert "8101 is the port of the API too" in about("worker", found)[0]["text"]
    assert about("router", found)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that a worker would begin to load."""
    for name, content in llama_like("{{ tools }}<tool_call></think>").contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_file({"model.norm.weight": np.ones(16)}, tmp_path / "model.safetensors")
    return tmp_path


FOO = json.dumps(TINY_CONFIG | {"architectures": ["FooForCausalLM"]})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{bad", "config.json is not a JSON object"),
        ("config.json", "[1]", "config.json is not a JSON object: it is a list"),
        ("config.json", FOO, "architecture not supported: FooForCausalLM"),
        ("tokenizer.json", "{}", "tokenizer.json is malformed"),
        ("model.safetensors", "short", "model.safetensors is incomplete or damaged"),
    ],
)
def test_a_model_that_a_worker_refuses_fails(
    name: str, content: str, words: str, model: Path
) -> None:
    assert found_here(RADIXGROVE_MODEL=str(model))[0] == 0
    (model / name).write_text(content)
    code, found = found_here(RADIXGROVE_MODEL=str(model))
    assert code == 1
    (said,) = about("model", found)
    assert said["verdict"] == "FAIL"
    assert words in said["text"]


def test_a_directory_without_a_model_is_called_what_it_is(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "has no config.json"), (tmp_path / "no", "is not a directory")):
        code, found = found_here(RADIXGROVE_MODEL=str(path))
        assert code == 1
        assert words in about("model", found)[0]["text"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OUTPUT_FORMAT", "herms", "output_format must be one of auto, none"),
        ("CHAT_TEMPLATE", "/nope", "No such file"),
        ("MAX_MODEL_LEN", "99999", "max_model_len 99999 exceeds the model's 8192"),
        ("TP", "2", "tp 2 does not divide the model's 9 query heads"),
    ],
)
def test_settings_that_do_not_fit_the_model_fail(
    name: str, value: str, words: str, demo_model_dir: Path
) -> None:
    _, found = found_here(**{f"RADIXGROVE_{name}": value})
    (said,) = about("model", found)
    assert said["verdict"] == "FAIL"
    assert words in said["text"]


def test_how_the_output_is_read_is_named(model: Path) -> None:
    for wanted, text in (
        ("auto", "hermes (reasoning in <think>)"),
        ("glm", "glm (reasoning in <think>)"),
        ("none", "none (no reasoning): requests with tools are refused"),
    ):
        environ = {"RADIXGROVE_MODEL": str(model), "RADIXGROVE_OUTPUT_FORMAT": wanted}
        size, remark = about("model", found_here(**environ)[1])
        assert size["text"].startswith(f"{model}: 0.00 billion parameters")
        assert remark == {"verdict": "ok", "subject": "model", "text": f"output format: {text}"}


def test_the_demo_model_is_named_with_its_format(demo_model_dir: Path) -> None:
    size, remark = about("model", found_here()[1])
    assert size["text"].startswith(f"{demo_model_dir}: 0.13 billion parameters, 0.54 GB")
    assert "requests with tools are refused" in remark["text"]


def test_the_demo_model_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    code, found = found_here(XDG_CACHE_HOME=str(cache))
    assert code == 0
    assert f"at first use, into {cache}/" in about("model", found)[0]["text"]
    assert not cache.exists()
    monkeypatch.setattr(demo_model, "_DISK_BYTES", 1 << 60)
    code, found = found_here(XDG_CACHE_HOME=str(cache))
    assert code == 1
    assert "MB free: make room" in about("model", found)[0]["text"]


BLIND = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {absent} else find(name, *rest)
"""


def test_a_machine_for_routers_alone_is_looked_at_too(tmp_path: Path) -> None:
    absent = ["torch", "psutil", "safetensors", "zmq", "numpy"]
    (tmp_path / "sitecustomize.py").write_text(BLIND.format(absent=absent))
    code, found = findings(PYTHONPATH=str(tmp_path))
    assert code == 0
    assert "pip install 'radixgrove[worker]'" in about("worker", found)[0]["text"]
    assert len(about("port", found)) == 2


def test_cuda_on_a_machine_without_one_fails() -> None:
    code, found = found_here(RADIXGROVE_DEVICE="cuda", PATH="/nonexistent")
    assert code == 1
    assert about("gpu", found)[0]["verdict"] == "FAIL"
    assert "nvidia-smi lists no GPU" in about("gpu", found)[0]["text"]


def test_ranks_without_a_gpu_each_fail(hopper: Machine) -> None:
    for settings, fails in (
        ({"RADIXGROVE_PP": "2"}, True),
        ({"RADIXGROVE_PP": "2", "RADIXGROVE_TRANSPORT": "gloo"}, False),
        ({"RADIXGROVE_TP": "2", "RADIXGROVE_DEVICE": "cpu"}, False),
    ):
        path = os.pathsep.join([str(hopper.folder / "bin"), os.environ["PATH"]])
        _, found = found_here(PATH=path, **settings)
        said = [finding["text"] for finding in about("gpu", found)[1:]]
        assert (
            said
            == [
                "rank 1 of this machine has no device: there are 1; lower tp, pp or "
                "dp, raise nodes, or let stages share devices with transport gloo"
            ]
            * fails
        )
