"""Runs an agent over the fake engine and frontend: `run_agent.py SETTINGS_JSON`, or in a fork."""

import sys
import tempfile
from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.redis_link import RedisLink
from radixgrove.worker.agent.agent import Modules, run


async def _fail(link: RedisLink) -> None:
    raise ValueError("unforeseen")


def main(arguments: list[str]) -> None:
    """Of a fork, which does what python does when a command starts with these variables."""
    from tests.worker.agent import sitecustomize  # noqa: F401

    tempfile.tempdir = None
    _main(*arguments)


def _main(settings: str) -> None:
    if Path(tempfile.gettempdir(), "redis-link-fails").exists():
        RedisLink.run = _fail
    modules = Modules("fake_engine", "fake_frontend")
    sys.exit(run(WorkerSettings.model_validate_json(settings), modules))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    finally:
        assert "torch" not in sys.modules
