"""`radixgrove doctor` finds what is wrong and tells no secret."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

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
    assert said.startswith("attention auto: torch here, ")
    assert said.split(", ")[1] in {"flashinfer on a GPU", "triton on a GPU", "torch on a GPU"}


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
