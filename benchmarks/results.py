"""Where measurements are kept: JSON lines with the card, versions and commit they belong to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "benchmarks" / "configs"  # of models with random weights
# Every line has these, `model` null where there is none, and `device`, `commit`, `date`.
KEYS = ("benchmark", "workload", "model", "subject", "metric", "value", "unit")
_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")


def directory() -> Path:
    """`$BENCHMARK_RESULTS`, else `benchmarks/results`."""
    return Path(os.environ.get("BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")


def record(entry: dict[str, Any]) -> None:
    """Append one figure to the file named by its `benchmark` key.

    An entry has `KEYS` and what else it likes; `device`, `commit` and `date` are added.

    Raises:
        ValueError: a key is missing.
    """
    missing = [key for key in KEYS if key not in entry]
    if missing:
        raise ValueError(f"a figure needs {', '.join(missing)}")
    path = directory() / f"{entry['benchmark']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = time.gmtime()
    stamp = {"date": time.strftime("%F", now), "time": time.strftime("%FT%TZ", now)}
    line = json.dumps({"device": _card() or "cpu", **entry, **environment(), **stamp})
    with path.open("a") as file:
        file.write(line + "\n")


@cache
def environment() -> dict[str, Any]:
    """What decides a measurement beside the code's settings."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
        "card": _card(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """`$BENCHMARK_COMMIT`, for copies without history; `-dirty` when files differ from it."""
    if commit := os.environ.get("BENCHMARK_COMMIT"):
        return commit
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _card() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
