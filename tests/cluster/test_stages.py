"""The real worker in groups of two pods on two nodes: a model in two stages, and two members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.cluster.harness import demo, groups
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.faults import Faults
from tests.cluster.harness.node import Node
from tests.cluster.harness.served import Served, message, reason
from tests.cluster.harness.traffic import Client, Traffic
from tests.cluster.harness.volumes import Mounts

pytestmark = pytest.mark.cluster

ENGINE = {"contextLength": 512, "kvTokens": 4096, "maxRunning": 4, "settings": {"cpu_threads": 1}}
TWO_NODES = {"device": "cpu", "cpu": "100m", "memory": "3Gi", "nodes": 2}
SURGE = {"maxUnavailable": 0, "maxSurge": 1}
QUESTION = "Name three colours."


@contextmanager
def served(cluster: Cluster, mounts: Mounts, name: str, **parallelism: int) -> Iterator[Served]:
    """One ready group on two nodes, whose demo model is spread so."""
    service = Served(cluster.kubectl, demo.NAMESPACE, name)
    changes: dict[str, Any] = {
        "hardware": TWO_NODES,
        "parallelism": {"tp": 1, **parallelism},
        "engine": ENGINE,
        "recovery": groups.RECOVERY,
        "rollout": SURGE,
    }
    service.apply(demo.spec(mounts, 1, **changes))
    service.wait_until_ready(1)
    try:
        yield service
    finally:
        service.delete()


def member_states(status: dict[str, Any]) -> list[str]:
    (group,) = status["groups"]
    return [member["state"] for member in group["members"]]


def test_a_model_in_two_stages_serves_through_recovery_and_rollout(
    installed: Cluster, worker_mounts: Mounts, client: Client, faults: Faults
) -> None:
    with served(installed, worker_mounts, "staged", pp=2) as staged:
        pods = groups.members(staged)
        assert pods[0].node != pods[1].node
        url = staged.status()["url"]
        answer = client.ask(url, staged.name, QUESTION)
        assert answer

        faults.kill_container(staged.namespace, pods[1].name)
        groups.wait_until_recreated(staged, pods)
        assert client.ask(url, staged.name, QUESTION) == answer

        pods = groups.members(staged)
        staged.kubectl.delete("pod", pods[0].name, "-n", staged.namespace, wait=False)
        groups.wait_until_recreated(staged, pods)
        assert client.ask(url, staged.name, QUESTION) == answer

        with Traffic(client, url, staged.name) as traffic:
            traffic.wait_for_more(2)
            staged.patch({"engine": {"maxRunning": 5}})
            staged.wait_until_ready(1)
            traffic.wait_for_more(2)
        assert traffic.failures == []


def test_a_stage_on_a_lost_node_is_replaced_with_its_group_and_the_conditions_say_so(
    installed: Cluster, victim: Node, worker_mounts: Mounts, client: Client, faults: Faults
) -> None:
    with ExitStack() as stack:
        with groups.cordoned(installed, installed.nodes[1]):
            staged = stack.enter_context(served(installed, worker_mounts, "lost-stage", pp=2))
        pods = groups.members(staged)
        assert victim.name in {pod.node for pod in pods}
        url = staged.status()["url"]
        answer = client.ask(url, staged.name, QUESTION)
        faults.freeze(victim)
        status = staged.wait(
            lambda s: reason(s, "Ready") == "False/Recovering", "the group is made again"
        )
        assert reason(status, "Degraded") == "True/Recovering"
        assert "group 0 is made again, since lost-stage-0-a1-" in message(status, "Degraded")
        groups.wait_until_recreated(staged, pods)
        assert victim.name not in {pod.node for pod in groups.members(staged)}
        assert client.ask(url, staged.name, QUESTION) == answer
        faults.thaw(victim)
        faults.wait_until(victim, ready=True)


def test_a_group_of_two_members_shows_both_and_moves_whole(
    installed: Cluster, worker_mounts: Mounts, client: Client, faults: Faults
) -> None:
    with served(installed, worker_mounts, "members", dp=2) as pair:
        both = pair.wait(lambda s: member_states(s) == ["Ready"] * 2, "both members are ready")
        names = [member["name"] for member in both["groups"][0]["members"]]
        assert [name.rpartition("/")[2] for name in names] == ["0", "1"]
        answer = client.ask(both["url"], pair.name, QUESTION)
        pods = groups.members(pair)
        faults.kill_container(pair.namespace, pods[1].name)
        groups.wait_until_recreated(pair, pods)
        pair.wait(lambda s: member_states(s) == ["Ready"] * 2, "both members are ready again")
        assert client.ask(both["url"], pair.name, QUESTION) == answer
