"""How a local cluster shares out the machine."""

from __future__ import annotations

import pytest

from radixgrove.cli.cluster import ClusterError, plan_gpus


def test_gpus_are_shared_out_without_overlap() -> None:
    assert plan_gpus(2, 2, ["0", "1", "2", "3"]) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ClusterError, match="3 replicas of 2 GPUs need 6; this machine offers 4"):
        plan_gpus(3, 2, ["0", "1", "2", "3"])
