"""What the ranks of a group must agree on before they compute together, and what proves them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from radixgrove.protocol.model.directory import CONFIG, WEIGHTS, WEIGHTS_INDEX
from radixgrove.protocol.settings import WorkerSettings, reveal
from radixgrove.worker.parallel.channel import digest

# Of one machine, or without a part in what the ranks compute.
_OWN = {
    "host",
    "port",
    "management_host",
    "management_port",
    "management_key",
    "api_keys_file",
    "internal_key",
    "cluster_secret",
    "redis_url",
    "redis_prefix",
    "max_body_bytes",
    "max_bodies_bytes",
    "prompt_cache_bytes",
    "cors_origins",
    "chat_template",
    "output_format",
    "sampling_defaults",
    "tools_strict",
    "json_whitespace",
    "grammar_threads",
    "request_timeout",
    "drain_timeout",
    "log_level",
    "log_json",
    "log_prompts",
    "model",
    "served_model_name",
    "service",
    "frontends",
    "replica_id",
    "advertise_url",
    "node_rank",
    "cpu_threads",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a group, the same on all its ranks; all but `token` may be shown to others."""

    token: bytes
    version: str
    settings: str  # digests, hexadecimal
    model: str

    @classmethod
    def of(cls, settings: WorkerSettings, model_dir: Path) -> Identity:
        return cls(
            group_token(settings), version("radixgrove"), _settings(settings), _model(model_dir)
        )

    def difference(self, other: tuple[str, str, str]) -> str | None:
        """What a peer's version, settings and model differ in, in words; None: nothing."""
        for name, own, its in zip(
            ("version", "settings", "model"),
            (self.version, self.settings, self.model),
            other,
            strict=True,
        ):
            if own != its:
                return f"it has another {name}: {its[:16]}, not {own[:16]}"
        return None


def group_token(settings: WorkerSettings) -> bytes:
    """Proves a rank to its group: of the installation's key and of the group's attempt.

    An attempt has an address of its own to meet at, so that a rank of an older one cannot join. On
    one machine the private directory in which ranks meet is the proof.
    """
    key = reveal(settings.internal_key) or reveal(settings.cluster_secret) or ""
    return digest(key.encode(), b"radixgrove group", (settings.master or "").encode())


def _settings(settings: WorkerSettings) -> str:
    plain = settings.model_dump(mode="json", exclude=_OWN)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _model(model_dir: Path) -> str:
    """Of the model's shape, and of which tensors its files hold."""
    found = hashlib.sha256()
    for name in (CONFIG, WEIGHTS_INDEX):
        path = model_dir / name
        content = path.read_bytes() if path.exists() else b""
        found.update(digest(b"", name.encode(), content))
    weights = model_dir / WEIGHTS
    if weights.exists():
        found.update(digest(b"", _header(weights), str(weights.stat().st_size).encode()))
    return found.hexdigest()


def _header(path: Path) -> bytes:
    """A safetensors file's: names, shapes and places of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, 100 << 20))
