"""Archives of images, as nodes are given them."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.harness import images, release
from tests.cluster.harness.images import Recipe, scratch_image, write_together


def test_images_written_together_share_their_layers(tmp_path: Path) -> None:
    programs = {}
    for name in ("one", "two"):
        programs[name] = tmp_path / name
        programs[name].write_text(f"program {name}")
    programs_of = {"first": "one", "second": "two", "third": "one"}
    archives = [
        scratch_image(tmp_path / f"{image}.tar", f"localhost/{image}:1", programs[program])
        for image, program in programs_of.items()
    ]
    output = io.BytesIO()
    write_together(archives, output)

    output.seek(0)
    with tarfile.open(fileobj=output) as together:
        names = together.getnames()
        assert len(names) == len(set(names))
        manifest = json.load(_content(together, "manifest.json"))
        assert [image["RepoTags"] for image in manifest] == [
            [f"localhost/{i}:1"] for i in programs_of
        ]
        for image, program in zip(manifest, programs_of.values(), strict=True):
            assert "rootfs" in json.load(_content(together, image["Config"]))
            (layer,) = image["Layers"]
            with tarfile.open(fileobj=_content(together, layer)) as files:
                assert _content(files, program).read() == programs[program].read_bytes()
    assert manifest[0]["Layers"] == manifest[2]["Layers"]


def test_a_recipe_changes_with_what_the_image_is_made_of_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    dockerfile = tmp_path / "part" / "Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text("FROM base\nCOPY code one.txt ./\nCOPY --from=build /not/here /there\n")
    code = tmp_path / "code" / "inner" / "module.py"
    code.parent.mkdir(parents=True)
    for path in (code, tmp_path / "one.txt"):
        path.write_text("first")
    recipe = Recipe("localhost/part:1", dockerfile, tmp_path)
    key = recipe.key()

    (tmp_path / "two.txt").write_text("which is not copied")
    cached = code.parent / "__pycache__" / "module.pyc"
    cached.parent.mkdir()
    cached.write_text("which no image gets")
    assert recipe.key() == key

    seen = {key, replace(recipe, arguments={"A": "1"}).key(), replace(recipe, base=recipe).key()}
    code.write_text("other")
    seen.add(recipe.key())
    code.chmod(0o700)
    seen.add(recipe.key())
    code.rename(code.with_name("moved.py"))
    seen.add(recipe.key())
    dockerfile.write_text(dockerfile.read_text() + "USER 1\n")
    seen.add(recipe.key())
    assert len(seen) == 7


def test_the_release_is_made_of_the_checkouts_code() -> None:
    for recipe in release.recipes()[:2]:
        assert {"operator/radixgrove/operator/controller/main.py", "requirements/build.txt"} <= {
            path.relative_to(recipe.context).as_posix() for path in recipe.files()
        }


@pytest.mark.cluster
def test_what_an_interrupted_build_has_left_does_not_stop_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(images, "_KEPT_STAGES", 0)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    stage = images._buildah("build", "--quiet", str(tmp_path)).strip()
    images._buildah("from", "--pull-never", stage)

    with images._building():
        images._prune()
        assert images._buildah("images", "--quiet", "--all").strip(), "somebody is building"
    images._prune()
    assert not images._buildah("images", "--quiet", "--all").strip()


def _content(tar: tarfile.TarFile, name: str) -> io.BytesIO:
    found = tar.extractfile(name)
    assert found is not None
    return io.BytesIO(found.read())
