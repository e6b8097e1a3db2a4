"""Runs an agent over the fake engine and frontend: `run_agent.py SETTINGS_JSON`."""

import sys

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.agent.agent import Modules, run

if __name__ == "__main__":
    code = run(
        WorkerSettings.model_validate_json(sys.argv[1]), Modules("fake_engine", "fake_frontend")
    )
    assert "torch" not in sys.modules
    sys.exit(code)
