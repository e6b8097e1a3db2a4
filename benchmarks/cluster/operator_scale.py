"""What many services cost the operator, on a real control plane with pretended nodes.

    python -m benchmarks.cluster.operator_scale --nodes 200 --services 100

Each service takes two nodes of eight GPUs; the operator starts when all of them exist. Needs the
programs of `make cluster-build`. Lines go to benchmarks/results/operator_scale.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kwok import PretendedNodes
from tests.conftest import RedisServer
from tests.operator.operator_process import (
    OperatorProcess,
    install,
    namespace_with_models,
)
from tests.operator.scale import Scale, measure, summary


def run(nodes: int, services: int, rest: float) -> Scale:
    with (
        tempfile.TemporaryDirectory(prefix="radixgrove-bench-") as scratch,
        ControlPlane() as plane,
        PretendedNodes(plane, nodes),
        RedisServer(Path(scratch)) as server,
    ):
        install(plane, [])
        plane.kubectl.apply(*namespace_with_models("served"))
        operator = OperatorProcess(plane, Path(scratch), server.port)
        try:
            return measure(plane, operator, "served", services, rest)
        finally:
            operator.kill()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--rest", type=float, default=60.0, help="seconds to watch it at rest")
    arguments = parser.parse_args(argv)
    if 2 * arguments.services > arguments.nodes:
        parser.error(f"{arguments.services} services need {2 * arguments.services} nodes")
    found = run(arguments.nodes, arguments.services, arguments.rest)
    for metric, (value, unit) in summary(found).items():
        print(f"{metric:<12}{value:>10.2f} {unit}")
        results.record(
            {
                "benchmark": "operator_scale",
                "workload": f"{arguments.services} services, {arguments.nodes} nodes",
                "model": None,
                "subject": "radixgrove",
                "metric": metric,
                "value": value,
                "unit": unit,
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
