"""Where a machine stands in its group, and which groups are refused before anything starts."""

from __future__ import annotations

import pytest

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.worker.agent.preparation import AgentError, check_group, with_group

LAUNCHED = {
    "NNODES": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "svc-0-a1-0.svc",
    "MASTER_PORT": "29500",
}


def settings(**changes: object) -> WorkerSettings:
    return WorkerSettings.model_validate(changes)


def test_launchers_say_by_variables_where_a_machine_stands() -> None:
    found = with_group(settings(), LAUNCHED)
    assert (found.nodes, found.node_rank, found.master) == (2, 1, "svc-0-a1-0.svc:29500")


def test_what_is_set_goes_before_variables() -> None:
    found = with_group(settings(nodes=3, node_rank=0, master="a:1"), LAUNCHED)
    assert (found.nodes, found.node_rank, found.master) == (3, 0, "a:1")


@pytest.mark.parametrize("value", ["two", "0", "-1", ""])
def test_a_variable_that_is_no_number_of_machines_is_named(value: str) -> None:
    with pytest.raises(AgentError, match="NNODES is"):
        with_group(settings(), {"NNODES": value})


TWO = {"pp": 2, "nodes": 2, "master": "10.0.0.1:29500", "internal_key": "a key"}


@pytest.mark.parametrize("node_rank", [0, 1])
def test_two_machines_that_know_their_place_and_have_a_key_may_start(node_rank: int) -> None:
    check_group(settings(**TWO, node_rank=node_rank), {})
    check_group(
        settings(**TWO, node_rank=node_rank), {"GROUP_MARKER": "/run/joined", "WORLD_SIZE": "2"}
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node_rank": 2}, "node_rank 2 is none of 2 machines"),
        ({"node_rank": 1, "nodes": 1}, "node_rank 1 is none of 1 machine, from 0"),
        ({"master": None}, "needs --master HOST:PORT"),
        ({"master": "10.0.0.1"}, "'10.0.0.1' is not host:port"),
        ({"master": "localhost:8101"}, "--master and --management-port have one port, 8101"),
        ({"host": "::", "port": 29500}, "--master and --port have one port, 29500"),
        ({"internal_key": None}, "needs internal_key"),
        ({"dp": 2, "nodes": 4}, "dp 2 members"),
        ({"pp": 3}, "nodes must divide"),
    ],
)
def test_other_groups_are_refused_in_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(AgentError, match=words) as refused:
        check_group(settings(**{**TWO, **changes}), {})
    assert refused.value.code == exit_codes.USAGE
