"""The engine process: what its peers see of it, in good and bad times."""

from __future__ import annotations

from tests.engine.conftest import StartEngine
from tests.scheduler.fake_executor import expected_output
from tests.scheduler.harness import request

PROMPT = list(range(20))


def test_answers_requests_of_several_frontends_each_at_its_own_socket(
    start_engine: StartEngine,
) -> None:
    engine = start_engine({"frontends": 2})
    for index in range(6):
        engine.send(request(f"r{index}", [*PROMPT, index], 8, frontend=index % 2))
    engine.until_ended("r0", "r2", "r4", frontend=0)
    assert set(engine.ends) == {"r0", "r2", "r4"}
    engine.until_ended("r1", "r3", "r5", frontend=1)
    for index in range(6):
        sampling = request("", PROMPT, 8).sampling
        assert engine.tokens[f"r{index}"] == expected_output([*PROMPT, index], sampling, 50)
    assert engine.terminate()[0] == 0
