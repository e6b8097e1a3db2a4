"""What is said of a model's directory before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.exit_codes import CodedStartFailed
from radixgrove.worker.agent.model_files import check, check_for, remarks
from tests.worker.agent.conftest import TINY_CONFIG, write_index


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("", "model.safetensors is missing; download"),
        ("model-00001-of-00002.safetensors", "shards without model.safetensors.index.json"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("tiny-Q4_K_M.gguf", "GGUF"),
        ("consolidated.00.pth", "in transformers' form"),
    ],
    ids=str,
)
def test_a_model_without_its_weights_is_called_what_it_is(
    there: str, words: str, model_dir: Path
) -> None:
    (model_dir / "model.safetensors").unlink()
    if there:
        (model_dir / there).touch()
    with pytest.raises(ModelError, match=words):
        check(model_dir, weights=True)
    check(model_dir, weights=False)


def test_a_shard_that_is_not_there_is_named(model_dir: Path) -> None:
    write_index(model_dir, "model-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00002\.safetensors is missing"):
        check(model_dir, weights=True)
    (model_dir / "model-00002.safetensors").symlink_to("../../blobs/abc")
    with pytest.raises(ModelError, match=r"is a link to \.\./\.\./blobs/abc, which is not there"):
        check(model_dir, weights=True)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_clone_without_git_lfs_is_called_what_it_is(name: str, model_dir: Path) -> None:
    (model_dir / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")
    with pytest.raises(ModelError, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        check(model_dir, weights=True)


def test_a_file_that_cannot_be_read_hides_no_reason(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_dir / "tokenizer.json").write_text("{")
    unreadable = model_dir / "notes.txt"
    unreadable.write_text("of another user")
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        check(model_dir, weights=False)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tp": 4}, r"tp 4 does not divide the model's 2 query heads"),
        ({"tp": 2, "ep": 2}, r"ep 2 is for models with experts"),
        ({"pp": 3}, r"pp 3 exceeds the model's 2 layers"),
        ({"pp": 2, "pp_layers": [2, 2]}, r"pp_layers \[2, 2\] are not the model's 2 layers"),
        ({"max_model_len": 513}, r"max_model_len 513 exceeds the model's 512"),
    ],
    ids=str,
)
def test_a_model_that_is_not_as_large_as_asked_is_refused_before_ranks_start(
    asked: dict[str, object], words: str, model_dir: Path
) -> None:
    check_for(WorkerSettings(), model_dir)
    with pytest.raises(CodedStartFailed, match=words):
        check_for(WorkerSettings.model_validate(asked), model_dir)


def test_weights_that_are_not_loaded_need_not_be_there(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    check_for(WorkerSettings.model_validate({"load_format": "dummy"}), model_dir)
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        check_for(WorkerSettings(), model_dir)


@pytest.mark.parametrize(
    ("template", "asked", "warns"),
    [
        ("{{ messages }}", "auto", False),  # the model has no tools that could be read
        ("{{ tools }}{{ messages }}", "auto", True),
        ("{{ tools }}{{ messages }}", "none", False),
        ("{{ tools }}<tool_call>", "auto", False),
    ],
)
def test_tools_that_cannot_be_read_are_warned_of_unless_asked_for(
    template: str, asked: str, warns: bool, model_dir: Path
) -> None:
    (model_dir / "chat_template.jinja").write_text(template)
    settings = WorkerSettings.model_validate({"output_format": asked})
    (remark,) = remarks(check_for(settings, model_dir), settings)
    assert remark.text.startswith("output format: ")
    assert remark.warns is warns


def test_what_the_model_recommends_and_lacks_is_remarked(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY_CONFIG | {"vocab_size": 1}))
    (model_dir / "generation_config.json").write_text('{"temperature": 0.5}')
    (model_dir / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    settings = WorkerSettings()
    _, drawn, unknown = remarks(check_for(settings, model_dir), settings)
    assert "sampled with temperature 0.5, as the model recommends" in drawn.text
    assert unknown.warns
