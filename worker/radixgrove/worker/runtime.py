"""The private directory through which the processes of one worker find each other.

The agent makes it (mode 0700) and writes `worker.json` (mode 0600, secrets included); engine and
frontends read it at start. Sockets are those of `radixgrove.worker.messages`; processes write their
metrics under `metrics` in prometheus_client's multiprocess format.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings

_FILE = "worker.json"


@dataclass(frozen=True)
class Runtime:
    """What every process of a worker knows.

    `settings` are resolved: `port` is the reserved one (never 0), `served_model_name` names at
    least one model, `replica_id` and `advertise_url` are set. `model_dir` is a local Hugging Face
    directory.
    """

    directory: Path
    settings: WorkerSettings
    model_dir: Path

    # Each data-parallel member has an engine of its own, and sockets.

    def engine_socket(self, member: int = 0) -> str:
        return f"ipc://{self.directory}/engine-{member}.sock"

    def agent_socket(self, member: int = 0) -> str:
        return f"ipc://{self.directory}/agent-{member}.sock"

    def frontend_socket(self, index: int, member: int = 0) -> str:
        return f"ipc://{self.directory}/frontend-{index}-{member}.sock"

    @property
    def metrics_dir(self) -> Path:
        """In the environment of every process of the worker, as `PROMETHEUS_MULTIPROC_DIR`."""
        return self.directory / "metrics"

    def write(self) -> None:
        """Write `worker.json`, readable by this user only."""
        content = {"settings": self.settings.in_clear(), "model_dir": str(self.model_dir)}
        descriptor = os.open(self.directory / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)

    @classmethod
    def load(cls, directory: Path) -> Runtime:
        """Read what the agent wrote."""
        content = json.loads((directory / _FILE).read_bytes())
        return cls(
            directory=directory,
            settings=WorkerSettings.model_validate(content["settings"]),
            model_dir=Path(content["model_dir"]),
        )
