"""The private directory through which the processes of one worker find each other.

The agent makes it (mode 0700) and writes `worker.json` (mode 0600, secrets included); engine and
frontends read it at start. Sockets are those of `radixgrove.worker.messages`; processes write their
metrics under `metrics` in prometheus_client's multiprocess format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings

_FILE = "worker.json"


def _engine(member: int) -> str:
    return f"engine-{member}"


def _agent(member: int) -> str:
    return f"agent-{member}"


def _frontend(index: int, member: int) -> str:
    return f"frontend-{index}-{member}"


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

    def address(self, socket: str) -> str:
        return f"ipc://{self.directory}/{socket}.sock"

    # Each data-parallel member has an engine of its own, and sockets.

    def engine_socket(self, member: int = 0) -> str:
        return self.address(_engine(member))

    def agent_socket(self, member: int = 0) -> str:
        return self.address(_agent(member))

    def frontend_socket(self, index: int, member: int = 0) -> str:
        return self.address(_frontend(index, member))

    @property
    def machine_socket(self) -> str:
        """Of the agent of a machine other than the first, which its ranks tell that they joined."""
        return self.address("machine")

    def engine_sockets(self, members: Iterable[int]) -> list[str]:
        """Names of those that members' engines read."""
        return [_engine(member) for member in members]

    def peer_sockets(self, members: Iterable[int]) -> list[str]:
        """Names of those through which members' engines are heard."""
        frontends = range(self.settings.frontends)
        return [
            name
            for member in members
            for name in (_agent(member), *(_frontend(index, member) for index in frontends))
        ]

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
