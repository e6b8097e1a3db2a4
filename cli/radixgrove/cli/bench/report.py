"""From samples to figures, a table, and lines for `benchmarks/results`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixgrove.cli.bench.sender import Sample

_PERCENTILES = (50, 90, 99)
_LATE_MS = 50.0
_BUSY_SHARE = 0.8  # of a core: a sender that has no time left measures itself
_REMEDY = "use more --processes, or another machine, before trusting these figures"


@dataclass(frozen=True)
class Objective:
    """A service level: both must hold for a request to count as good."""

    ttft: float  # seconds to the first token
    tpot: float  # seconds a further token, on average of the request


@dataclass(frozen=True)
class Figure:
    metric: str
    value: float
    unit: str


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks of at least one value."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def time_per_token(sample: Sample) -> float | None:
    """Seconds a token after the first; None when there was at most one."""
    if sample.first is None or sample.output_tokens < 2:
        return None
    return (sample.total - sample.first) / (sample.output_tokens - 1)


def is_good(sample: Sample, objective: Objective) -> bool:
    if sample.error is not None or sample.first is None or sample.first > objective.ttft:
        return False
    per_token = time_per_token(sample)
    return per_token is None or per_token <= objective.tpot


def figures(
    samples: Sequence[Sample], objective: Objective, client_cpu: Sequence[float] = ()
) -> list[Figure]:
    """All figures of a run of at least one request; `client_cpu` is CPU seconds of each sender.

    A failed request counts against goodput, and in no latency or throughput. Tokens are those of
    the streams' `usage`. The inter-token latency is the time between two events with text: where
    the server joins tokens in one event, `tokens per event` is above 1 and says by how much that
    differs from a time between tokens; `time per token` is exact in any case.
    """
    done = [sample for sample in samples if sample.error is None]
    duration = max(s.sent + s.total for s in samples) - min(s.sent for s in samples)
    prompt = sum(sample.prompt_tokens for sample in done)
    output = sum(sample.output_tokens for sample in done)
    good = sum(is_good(sample, objective) for sample in done)
    found = [
        Figure("requests", len(samples), "1"),
        Figure("failed", len(samples) - len(done), "1"),
        Figure("duration", duration, "s"),
        Figure("request throughput", len(done) / duration, "1/s"),
        Figure("input throughput", prompt / duration, "tokens/s"),
        Figure("output throughput", output / duration, "tokens/s"),
        Figure("goodput", good / duration, "1/s"),
        Figure("good share", good / len(samples), "1"),
    ]
    if prompt:
        found.append(Figure("hit rate", sum(s.cached_tokens for s in done) / prompt, "1"))
    if events := sum(len(s.gaps) + (s.first is not None) for s in done):
        found.append(Figure("tokens per event", output / events, "1"))
    per_token = [t for sample in done if (t := time_per_token(sample)) is not None]
    for name, values in (
        ("ttft", [sample.first for sample in done if sample.first is not None]),
        ("inter-token latency", [gap for sample in done for gap in sample.gaps]),
        ("time per token", per_token),
        ("request latency", [sample.total for sample in done]),
    ):
        # Without values there is no percentile: a row of 0 ms would be a lie.
        for share in _PERCENTILES if values else ():
            found.append(Figure(f"{name} p{share}", percentile(values, share) * 1000, "ms"))
    late = [sample.late for sample in samples]
    found.append(Figure("send delay p99", percentile(late, 99) * 1000, "ms"))
    if client_cpu:
        found.append(Figure("client cpu", sum(client_cpu), "s"))
        found.append(Figure("busiest client", max(client_cpu) / duration, "1"))
    return found


def table(found: Sequence[Figure], samples: Sequence[Sample], objective: Objective) -> str:
    """For people; says when the load generator itself was late, and why requests failed."""
    width = max(len(figure.metric) for figure in found)
    lines = [
        f"{f.metric:<{width}}  {f.value:>12.4g} {'' if f.unit == '1' else f.unit}" for f in found
    ]
    lines.append(
        f"good: first token within {objective.ttft * 1000:.0f} ms and "
        f"{objective.tpot * 1000:.0f} ms a further token"
    )
    errors = Counter(sample.error for sample in samples if sample.error is not None)
    for reason, count in errors.most_common():
        said = next((s.said for s in samples if s.error == reason and s.said), "")
        lines.append(f"failed: {count} x {reason}{said and f', such as: {said}'}")
    if all(sample.error is not None for sample in samples):
        return "\n".join(lines)  # nothing was measured that a busy sender could spoil
    values = {figure.metric: figure.value for figure in found}
    if (delay := values["send delay p99"]) > _LATE_MS:
        lines.append(f"warning: requests left up to {delay:.0f} ms late: {_REMEDY}")
    if (share := values.get("busiest client", 0.0)) > _BUSY_SHARE:
        lines.append(f"warning: a sending process was busy {share:.0%} of the time: {_REMEDY}")
    return "\n".join(lines)


def append_results(path: Path, found: Sequence[Figure], common: dict[str, object]) -> None:
    """One JSON line a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for figure in found:
            row = {**common, "metric": figure.metric, "value": figure.value, "unit": figure.unit}
            file.write(json.dumps(row) + "\n")
