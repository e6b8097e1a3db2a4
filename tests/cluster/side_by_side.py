"""Which cluster tests go to one process where several run side by side (`pytest -n`).

Each process has a cluster or a control plane of its own, which its groups of files share one after
the other. (The mark `xdist_group` would say the same, but pytest-xdist 3.8 writes it where
pytest 9.2 does not read it any more, and then deals the tests out one by one.)
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

_GROUPS = {
    "tests/cluster/test_autoscale.py": "load",
    "tests/cluster/test_rollout.py": "load",
    "tests/cluster/test_upgrade.py": "load",
    "tests/cluster/test_groups.py": "groups",
    "tests/cluster/test_node_loss.py": "node loss",
    "tests/cluster/": "nodes",
    "tests/operator/test_operator_life.py": "operator's life",
    "tests/operator/test_rbac.py": "operator's life",
    "tests/operator/test_scale.py": "scale",
    "tests/operator/": "operator",
}


def group_of(nodeid: str) -> str | None:
    """The group of a test; None for one that is neither of the cluster's nor of the operator's."""
    return next((group for path, group in _GROUPS.items() if nodeid.startswith(path)), None)


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole groups to processes; other tests by file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or str(super()._split_scope(nodeid))
