"""Runs an agent over the fake engine and frontend: `run_agent.py SETTINGS_JSON`."""

import os
import sys
from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.redis_link import RedisLink
from radixgrove.worker.agent.agent import Modules, run


async def _fail(link: RedisLink) -> None:
    raise ValueError("unforeseen")


if __name__ == "__main__":
    if Path(os.environ["TMPDIR"], "redis-link-fails").exists():
        RedisLink.run = _fail
    code = run(
        WorkerSettings.model_validate_json(sys.argv[1]), Modules("fake_engine", "fake_frontend")
    )
    assert "torch" not in sys.modules
    sys.exit(code)
