"""Which cluster tests go to one process where several run side by side (`pytest -n`).

Two processes have a cluster each and the third none, only control planes; one file of theirs comes
after the other. (The mark `xdist_group` would say the same, but pytest-xdist 3.8 writes it where
pytest 9.2 does not read it any more, and then deals the tests out one by one.)
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

CONTROL_PLANES = "control planes"

_GROUPS = {
    "tests/cluster/test_autoscale.py": "groups",
    "tests/cluster/test_groups.py": "groups",
    "tests/cluster/test_rollout.py": "groups",
    "tests/cluster/test_upgrade.py": "groups",
    "tests/cluster/test_control_plane.py": CONTROL_PLANES,
    "tests/cluster/test_kwok.py": CONTROL_PLANES,
    "tests/cluster/test_teardown.py": CONTROL_PLANES,
    "tests/cluster/": "nodes",
    "tests/operator/": CONTROL_PLANES,
}


def group_of(nodeid: str) -> str | None:
    """The group of a test; None for one that is neither of the cluster's nor of the operator's."""
    return next((group for path, group in _GROUPS.items() if nodeid.startswith(path)), None)


def is_light(nodeid: str) -> bool:
    """Whether a test may go on beside what is timed (`machine.alone`): it has no pods that run."""
    return nodeid.startswith("tests/operator/") and not nodeid.startswith(
        "tests/operator/controller/test_scale"
    )


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole groups to processes; other tests by file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or str(super()._split_scope(nodeid))
