"""From `kubectl apply` to Ready on a real two-node cluster, by phase.

    python -m benchmarks.cluster.cluster_start --replicas 2

Installs the chart, applies an InferenceService of the demo model on CPU and waits until all its
replicas are Ready. Needs what `make cluster-build` and `make cluster-prepare` make. Lines go to
benchmarks/results/cluster_start.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from benchmarks import results
from tests.cluster.harness import demo, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served


def run(replicas: int) -> dict[str, float]:
    """Seconds of each phase of the group that was ready last."""
    with Cluster(nodes=2) as cluster:
        release.build_images(cluster)
        release.install(cluster)
        mounts = demo.prepare_namespace(cluster)
        served = Served(cluster.kubectl, demo.NAMESPACE, demo.SERVICE)
        applied = time.time()
        served.apply(demo.spec(mounts, replicas))
        served.wait_until_ready(replicas)
        ready = time.time()
        groups = [dict(_marks(served, pod)) for pod in served.pods()]
    last = max(groups, key=lambda marks: marks["serving"])
    marks = [applied, *(last[name] for name in ("started", "loading", "warming-up", "serving"))]
    names = ("pod started", "engine started", "loaded", "warmed up", "ready")
    steps = dict(zip(names, _differences([*marks, ready]), strict=True))
    return {**steps, "apply to ready": ready - applied}


def _marks(served: Served, pod: str) -> Iterator[tuple[str, float]]:
    """When a worker first said each phase of its start, in Unix seconds."""
    seen: set[str] = set()
    log = served.kubectl.run("logs", pod, "-n", served.namespace, "--container=worker")
    for line in filter(lambda line: line.startswith("{"), log.splitlines()):
        entry: dict[str, Any] = json.loads(line)
        name = _phase(entry["message"]) if seen else "started"
        if name and name not in seen:
            seen.add(name)
            yield name, datetime.fromisoformat(entry["time"]).timestamp()


def _phase(message: str) -> str:
    if message.startswith("ready after"):
        return "serving"
    if message.startswith("start: "):
        return message.removeprefix("start: ").partition(" ")[0].rstrip(":")
    return ""


def _differences(marks: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args(argv)
    for metric, seconds in run(arguments.replicas).items():
        print(f"{metric:<16}{seconds:>8.1f} s")
        results.record(
            {
                "benchmark": "cluster_start",
                "workload": f"{arguments.replicas} replicas on two nodes of one machine",
                "model": "SmolLM2-135M-Instruct",
                "subject": "radixgrove",
                "metric": metric,
                "value": round(seconds, 2),
                "unit": "s",
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
