"""Images: archives of static programs, a Debian base, and builds of real Dockerfiles."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def scratch_image(
    archive: Path, name: str, program: Path, arguments: Sequence[str] = (), user: str = "65532"
) -> Path:
    """Writes a docker-archive `name` that holds one static program and starts it.

    An image without an operating system needs no builder: it is one layer and three JSON files.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.mode = 0o755
        entry.size = program.stat().st_size
        with program.open("rb") as content:
            tar.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}", *arguments], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    config_bytes = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_bytes).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
    _write_tar(
        archive,
        {
            f"{digest}.tar": layer.getvalue(),
            config_name: config_bytes,
            "manifest.json": json.dumps(manifest).encode(),
        },
    )
    return archive


def _write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _architecture() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
