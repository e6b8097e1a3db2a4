"""Which process of tests takes which files (`--dist loadfile`): whole ones, the longest first.

A file's fixtures may be a cluster, which takes ten seconds of a core to start: cut in two, a file
has two of them. Files go one by one to whichever process is free, so that all end at about the
same time if those that are left for the end are short.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# What begins first: beginnings of paths. Compilers follow each other but for two at a time, as
# more would keep each other from ending within a test's time.
_FIRST = (
    "tests/e2e/test_tools.py",
    "tests/e2e/test_clients.py",
    "tests/kernels/test_compile.py",
    "tests/kernels/test_registers.py",
    "tests/e2e/",
    "tests/worker/parallel/",
    "tests/worker/agent/",
    "tests/worker/",
    "tests/router/",
)


def rank(file: str) -> int:
    """Files with lower ones begin earlier."""
    return next((n for n, begin in enumerate(_FIRST) if file.startswith(begin)), len(_FIRST))


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a file to a process that has at most two tests left."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: object) -> None:
        file = min(self.workqueue, key=rank)  # of equal ones the first
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
