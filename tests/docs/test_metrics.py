"""docs/metrics.md names every metric that is registered, with its type and labels, and no other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from radixgrove.operator.api import metrics as operator_metrics
from radixgrove.router import metrics as router_metrics
from radixgrove.service.logs import count_drops
from radixgrove.worker.engine.metrics import EngineMetrics
from radixgrove.worker.frontend.metrics import FrontendMetrics
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "metrics.md"


@dataclass(frozen=True)
class Metric:
    name: str  # as scraped
    type: str
    labels: tuple[str, ...] = ()


def registered() -> dict[str, Metric]:
    worker = CollectorRegistry()
    FrontendMetrics(worker)
    EngineMetrics(worker)
    count_drops(worker)
    assert router_metrics.REQUESTS in REGISTRY._collector_to_names
    found = {}
    for registry in (worker, operator_metrics.REGISTRY, REGISTRY):
        for collector in registry._collector_to_names:
            if isinstance(collector, MetricWrapperBase):
                name = f"{collector._name}_total" if collector._type == "counter" else (
                    collector._name
                )  # fmt: skip
                found[name] = Metric(name, collector._type, tuple(collector._labelnames))
    return found


def documented() -> dict[str, tuple[str, str]]:
    """Type and the whole row, by name."""
    row = re.compile(r"^\| `(radixgrove_\w+)[^|]*\| (\w+) \|.*$", re.MULTILINE)
    return {m.group(1): (m.group(2), m.group(0)) for m in row.finditer(PAGE.read_text())}


def test_every_registered_metric_is_on_the_page_and_no_other() -> None:
    ours = {name for name in registered() if name.startswith("radixgrove_")}
    assert len(ours) > 30
    assert set(documented()) == ours


def test_types_and_labels_are_as_registered() -> None:
    page = documented()
    for metric in registered().values():
        if metric.name in page:
            kind, row = page[metric.name]
            assert kind == metric.type, metric.name
            for label in metric.labels:
                assert re.search(rf"`{label}`|{{{label}}}", row), f"{metric.name}: {label}"
