"""Files that keep what was measured on a device, for the next start."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """`$RADIXGROVE_CACHE_DIR`, else `$XDG_CACHE_HOME/radixgrove`, else `~/.cache/radixgrove`."""
    if explicit := os.environ.get("RADIXGROVE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixgrove"


def tuned_path(kind: str, device: torch.device, *identity: str) -> Path:
    """Where choices are kept that were measured on such a device, with these versions."""
    import triton

    parts = torch.cuda.get_device_name(device), torch.__version__, triton.__version__, *identity
    name = blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
    return cache_directory() / f"{kind}-{name}.json"


def keep(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the file of `tuned_path`, whole or not at all; a failure is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("cannot keep what was tuned: %s", error.strerror)
