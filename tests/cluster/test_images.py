"""Archives of images, as nodes are given them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from tests.cluster.harness.images import scratch_image, write_together


def test_images_written_together_share_their_layers(tmp_path: Path) -> None:
    programs = {}
    for name in ("one", "two"):
        programs[name] = tmp_path / name
        programs[name].write_text(f"program {name}")
    images = {"first": "one", "second": "two", "third": "one"}
    archives = [
        scratch_image(tmp_path / f"{image}.tar", f"localhost/{image}:1", programs[program])
        for image, program in images.items()
    ]
    output = io.BytesIO()
    write_together(archives, output)

    output.seek(0)
    with tarfile.open(fileobj=output) as together:
        names = together.getnames()
        assert len(names) == len(set(names))
        manifest = json.load(_content(together, "manifest.json"))
        assert [image["RepoTags"] for image in manifest] == [[f"localhost/{i}:1"] for i in images]
        for image, program in zip(manifest, images.values(), strict=True):
            assert "rootfs" in json.load(_content(together, image["Config"]))
            (layer,) = image["Layers"]
            with tarfile.open(fileobj=_content(together, layer)) as files:
                assert _content(files, program).read() == programs[program].read_bytes()
    assert manifest[0]["Layers"] == manifest[2]["Layers"]


def _content(tar: tarfile.TarFile, name: str) -> io.BytesIO:
    found = tar.extractfile(name)
    assert found is not None
    return io.BytesIO(found.read())
