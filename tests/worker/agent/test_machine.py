"""Agents of two machines of a group, over fake engines: they meet, pass on, and end together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from radixgrove.service import exit_codes
from tests.conftest import find_free_port, wait_until
from tests.worker.agent.conftest import AgentProcess, StartAgent


@pytest.fixture
def start_machines(start_agent: StartAgent) -> Callable[..., list[AgentProcess]]:
    def start(**changes: object) -> list[AgentProcess]:
        settings = {
            "dp": 2,
            "nodes": 2,
            "master": f"127.0.0.1:{find_free_port()}",
            "internal_key": "a key of the installation",
            **changes,
        }
        return [start_agent(**settings, node_rank=node) for node in (0, 1)]

    return start


def test_the_engine_of_another_machine_is_heard_and_spoken_to(
    start_machines: Callable[..., list[AgentProcess]],
) -> None:
    first, second = start_machines()
    first.wait_ready()
    second.wait_for("all ranks of machine 1 have joined")
    members = first.manage("GET", "/status")[1]["members"]
    assert [member["ready"] for member in members] == [True, True]
    assert [member["stats"]["pages_total"] for member in members] == [64, 64]
    assert first.manage("POST", "/flush-cache")[0] == 202
    wait_until(lambda: "FlushCache" in second.heard(), what="the flush")
    # Both get SIGTERM; machine 0 says when it is over.
    second.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGTERM)
    assert [agent.end() for agent in (first, second)] == [0, 0]


def test_a_rank_that_is_killed_ends_both_machines_and_is_named_with_its_own(
    start_machines: Callable[..., list[AgentProcess]],
) -> None:
    first, second = start_machines()
    first.wait_ready()
    rank = second.rank(1)
    rank.kill()
    assert [agent.end() for agent in (first, second)] == [1, 1]
    named = f"engine rank 1 (process {rank.pid}) was killed by SIGKILL"
    assert f"machine 1 (127.0.0.1; ranks 1): {named}" in first.output
    assert named in second.output


def test_machines_end_with_the_first(start_machines: Callable[..., list[AgentProcess]]) -> None:
    first, second = start_machines()
    first.wait_ready()
    rank = first.rank(0)
    rank.kill()
    assert [agent.end() for agent in (first, second)] == [1, 1]
    assert f"machine 0 ended the group: engine rank 0 (process {rank.pid})" in second.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"internal_key": "another"}, "a frame has a wrong digest"),
        ({"redis_url": "redis://127.0.0.1:1"}, "it has another settings"),
    ],
)
def test_a_machine_that_is_none_of_the_groups_is_refused(
    start_agent: StartAgent, changes: dict[str, object], words: str
) -> None:
    master = f"127.0.0.1:{find_free_port()}"
    settings = {"dp": 2, "nodes": 2, "master": master, "internal_key": "a key"}
    first = start_agent(**settings, node_rank=0)
    other = start_agent(**{**settings, "node_rank": 1, **changes})
    first.wait_for("refused a peer at 127.0.0.1")
    assert words in first.output
    assert other.end() == 1
    # The group goes on waiting for the right one.
    second = start_agent(**settings, node_rank=1)
    second.wait_for("all ranks of machine 1 have joined")
    first.wait_ready()


def test_a_machine_without_a_first_one_ends_on_sigterm(start_agent: StartAgent) -> None:
    agent = start_agent(
        dp=2, nodes=2, node_rank=1, master=f"127.0.0.1:{find_free_port()}", internal_key="a key"
    )
    agent.wait_for("management port")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == 1


def test_only_a_machine_with_frontends_needs_their_keys(
    start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dp": 2, "nodes": 2, "internal_key": "a key", "api_keys_file": str(tmp_path / "no")}
    settings["master"] = f"127.0.0.1:{find_free_port()}"
    assert start_agent(**settings, node_rank=0).end() == exit_codes.USAGE
    start_agent(**settings, node_rank=1).wait_for("management port")
    (tmp_path / "joined").touch()
    monkeypatch.setenv("GROUP_MARKER", str(tmp_path / "joined"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    start_agent(**settings, node_rank=0).wait_for("waiting to be replaced")


def test_a_rank_that_was_stopped_is_named_as_stuck_though_it_is_killed(
    start_agent: StartAgent,
) -> None:
    """Of a pipeline, whose ranks meet by themselves."""
    agent = start_agent(
        pp=2, nodes=2, node_rank=1, master=f"127.0.0.1:{find_free_port()}", internal_key="a key"
    )
    rank = agent.rank(1)
    rank.suspend()
    assert agent.end() == 4
    errors = [line for line in agent.lines if " ERROR " in line]
    assert len(errors) == 1
    assert f"engine rank 1 (process {rank.pid}) is stuck: it has been stopped" in errors[0]
