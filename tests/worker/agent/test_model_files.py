"""What is said of a model's directory before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixgrove.protocol.model.config import ModelError
from radixgrove.worker.agent.model_files import check
from tests.worker.agent.conftest import write_index


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
