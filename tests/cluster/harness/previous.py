"""The chart version before this one, for upgrades: its CRD and what its operator renders differ.

Made from the present chart until an older one is tagged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness import images, release
from tests.cluster.harness.images import Recipe

VERSION = "0.0.9"
NEW_FIELD = "topologyKey"  # of the spec, unknown to the previous CRD


def make_chart(directory: Path) -> Path:
    """Writes the previous chart into a directory and returns its path."""
    chart = directory / "radixgrove"
    shutil.copytree(release.CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(
        yaml.safe_dump(
            yaml.safe_load(about.read_text()) | {"version": VERSION, "appVersion": VERSION}
        )
    )
    file = chart / "files" / "inferenceservice-crd.yaml"
    crd = yaml.safe_load(file.read_text())
    version = crd["spec"]["versions"][0]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][NEW_FIELD]
    file.write_text(yaml.safe_dump(crd))
    return chart


def recipe() -> Recipe:
    """The previous operator's image."""
    folder = images.FOLDER / "previous"
    present = next(found for found in release.recipes() if found.name == release.image("operator"))
    return Recipe(image("operator"), folder / "Dockerfile", folder, base=present)


def image(part: str) -> str:
    """The name of a part's previous image."""
    return f"{release.REGISTRY}/radixgrove/{part}-previous:{release.TAG}"


def values() -> dict[str, Any]:
    """Chart values that name the previous operator, and let router and Redis be replaced too."""
    return {
        "image": {"operator": {"repository": "radixgrove/operator-previous"}},
        "router": {"resources": {"requests": {"memory": "100Mi"}}},
        "redis": {"maxmemory": "512mb"},
    }
