"""Which cluster tests go to which process where several run side by side (`pytest -n`).

One process has control planes alone; each of the others has a cluster. Files go whole, one after
the other, to a process of their room that is free, in the order below: the longest first, so that
all end at about the same time, and last the one that has the machine for itself.
"""

from __future__ import annotations

from enum import StrEnum

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]


class Room(StrEnum):
    """What a file's tests share."""

    CONTROL_PLANES = "control planes"
    CLUSTERS = "clusters"


_CONTROL_PLANES = [
    "tests/operator/kube/test_rbac.py",
    "tests/operator/controller/test_operator_life.py",
    "tests/operator/controller/test_on_control_plane.py",
    "tests/cluster/test_teardown.py",
    "tests/operator/controller/test_scale.py",
    "tests/cluster/test_control_plane.py",
    "tests/cluster/test_kwok.py",
    "tests/operator/",
]
_CLUSTERS = [
    "tests/cluster/test_groups.py",
    "tests/cluster/test_rollout.py",
    "tests/cluster/test_stages.py",
    "tests/cluster/test_upgrade.py",
    "tests/cluster/test_documented.py",
    "tests/cluster/test_policies.py",
    "tests/cluster/test_model_cache.py",
    "tests/cluster/test_told.py",
    "tests/cluster/test_autoscale.py",
    "tests/cluster/test_cluster.py",
    "tests/cluster/test_release.py",
    "tests/cluster/test_demo.py",
    "tests/cluster/test_images.py",
    "tests/cluster/test_worker_image.py",
    "tests/cluster/test_node_loss.py",
]
_ORDER = {
    **dict.fromkeys(_CONTROL_PLANES, Room.CONTROL_PLANES),
    **dict.fromkeys(_CLUSTERS, Room.CLUSTERS),
}


def room_of(path: str) -> Room | None:
    """The room of a file, or of a test by its id; None for one that needs neither."""
    return next((room for known, room in _ORDER.items() if path.startswith(known)), None)


def is_light(nodeid: str) -> bool:
    """Whether a test may go on beside what is timed (`machine.alone`): it has no pods that run."""
    return nodeid.startswith("tests/operator/") and not nodeid.startswith(
        "tests/operator/controller/test_scale"
    )


class ByRoom(LoadScopeScheduling):  # type: ignore[misc]
    """The first process gets the control planes, and the others what needs clusters."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        path = self._next_of(node)
        if path is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(path, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue and self._next_of(node) is None:
            # It ends once it has run what it has: a process that waits keeps its last test back.
            if not node.shutting_down:
                node.shutdown()
            return
        super()._reschedule(node)

    def _next_of(self, node: WorkerController) -> str | None:
        """The file that a process is to run next, or None when there is none for it."""
        planes = any(room_of(nodeid) is Room.CONTROL_PLANES for nodeid in self.collection or ())
        own = Room.CONTROL_PLANES if planes and node.gateway.id == "gw0" else Room.CLUSTERS
        # A control plane costs seconds, a cluster minutes.
        possible = [
            path
            for path in self.workqueue
            if own is Room.CLUSTERS or room_of(path) is not Room.CLUSTERS
        ]
        return min(possible, key=lambda path: (room_of(path) is not own, _rank(path)), default=None)


def _rank(path: str) -> int:
    order = list(_ORDER)
    return next((place for place, known in enumerate(order) if path.startswith(known)), len(order))
