"""Load generation: what is sent, what is measured, and what is called good."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from radixgrove.cli.bench.report import Objective, figures, is_good, percentile, table
from radixgrove.cli.bench.sender import Sample
from radixgrove.cli.bench.workload import (
    Block,
    WorkloadError,
    block_text,
    read_trace,
    spread,
    synthesize,
)
from tests.cli.test_command import radixgrove
from tests.conftest import serving

OBJECTIVE = Objective(ttft=0.5, tpot=0.1)


def sample(**changes: Any) -> Sample:
    base = {"sent": 0.0, "late": 0.0, "first": 0.2, "total": 1.0, "output_tokens": 11}
    return Sample(**{**base, "prompt_tokens": 100, "cached_tokens": 25, **changes})


def test_blocks_with_one_number_are_one_text_of_the_exact_length() -> None:
    for characters in (2, 64, 1000):
        text = block_text(Block(7, characters))
        assert len(text) == characters
        assert text == block_text(Block(7, characters)) != block_text(Block(8, characters))


def test_synthetic_requests_share_as_many_prefixes_as_asked_for() -> None:
    size = {"requests": 50, "input_tokens": 100, "output_tokens": 5, "prefix_tokens": 60}
    planned = synthesize(**size, prefixes=3, seed=1)
    assert len({request.blocks[0] for request in planned}) == 3
    assert len({request.blocks[1] for request in planned}) == 50
    assert planned == synthesize(**size, prefixes=3, seed=1)
    other = synthesize(**size, prefixes=3, seed=2)
    assert not {r.blocks[0] for r in planned} & {r.blocks[0] for r in other}
    with pytest.raises(WorkloadError, match="shorter than the input"):
        synthesize(**{**size, "prefix_tokens": 100}, prefixes=3, seed=1)


def test_poisson_arrivals_have_the_asked_for_rate() -> None:
    size = {"requests": 4000, "input_tokens": 2, "output_tokens": 1, "prefix_tokens": 0}
    planned = list(spread(synthesize(**size, prefixes=1, seed=0), 20.0, seed=3))
    assert planned[-1].at == pytest.approx(4000 / 20, rel=0.1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(planned)]
    assert min(gaps) < 0.005 < 0.2 < max(gaps), "not evenly spaced"


def test_a_trace_is_sent_at_its_own_times_or_faster(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "hash_ids": [1, t], "output_length": 3} for t in (1000, 3000, 9000)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    planned = read_trace(trace, block_characters=64, speed=2, limit=2)
    assert [request.at for request in planned] == [0, 1]
    assert planned[0].blocks[0] == planned[1].blocks[0] == Block(1, 64)
    assert len(planned[0].prompt()) == 128
    trace.write_text('{"timestamp": 1}\n')
    with pytest.raises(WorkloadError, match="line 1"):
        read_trace(trace, block_characters=64)


def test_a_trace_may_hold_token_ids(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"token_ids": [5, 6], "output_length": 7, "seed": 8}\n')
    (planned,) = read_trace(trace, block_characters=64)
    assert planned.prompt() == [5, 6]
    assert (planned.at, planned.output_tokens, planned.seed) == (0.0, 7, 8)
    for line in ('{"output_length": 7}', '{"token_ids": ["a"], "output_length": 7}'):
        trace.write_text(line)
        with pytest.raises(WorkloadError, match="line 1"):
            read_trace(trace, block_characters=64)


def test_percentiles_interpolate() -> None:
    assert [percentile([3, 1, 2], share) for share in (0, 50, 100)] == [1, 2, 3]
    assert percentile([0, 10], 90) == pytest.approx(9)


def test_good_means_both_objectives_and_no_error() -> None:
    assert is_good(sample(), OBJECTIVE)  # (1.0 - 0.2) / 10 = 0.08 a token
    assert not is_good(sample(first=0.6), OBJECTIVE)
    assert not is_good(sample(total=1.5), OBJECTIVE)
    assert not is_good(sample(error="cut short"), OBJECTIVE)
    assert is_good(sample(output_tokens=1), OBJECTIVE), "one token has no time per token"


def test_failures_count_against_goodput_and_in_no_latency() -> None:
    samples = [sample(), sample(sent=1.0), sample(error="HTTP 429", first=None, total=0.01)]
    found = {figure.metric: figure.value for figure in figures(samples, OBJECTIVE)}
    assert found["requests"] == 3
    assert found["failed"] == 1
    assert found["duration"] == pytest.approx(2.0)
    assert found["request throughput"] == pytest.approx(1.0)
    assert found["output throughput"] == pytest.approx(11)
    assert found["hit rate"] == pytest.approx(0.25)
    assert found["good share"] == pytest.approx(2 / 3)
    assert found["ttft p99"] == pytest.approx(200)
    text = table(figures(samples, OBJECTIVE), samples, OBJECTIVE)
    assert "failed: 1 x HTTP 429" in text


def test_tokens_joined_in_one_event_are_told_apart_from_single_ones() -> None:
    samples = [sample(output_tokens=12, gaps=[0.1] * 5), sample(output_tokens=6, gaps=[0.1] * 2)]
    found = {figure.metric: figure.value for figure in figures(samples, OBJECTIVE)}
    assert found["tokens per event"] == pytest.approx(18 / (6 + 3))


def test_a_sender_without_time_to_spare_is_reported() -> None:
    calm, busy = (figures([sample()], OBJECTIVE, cpu) for cpu in ([0.2, 0.3], [0.2, 0.95]))
    assert "warning" not in table(calm, [sample()], OBJECTIVE)
    assert "busy 95% of the time" in table(busy, [sample()], OBJECTIVE)
    assert {f.metric: f.value for f in calm}["client cpu"] == pytest.approx(0.5)


def test_all_failed_yields_no_latency_rows() -> None:
    found = {f.metric for f in figures([sample(error="timeout", first=None)], OBJECTIVE)}
    assert not [metric for metric in found if metric.startswith("ttft")]


def test_a_sender_of_requests_that_all_failed_has_spoilt_no_figures() -> None:
    failed = [sample(error="HTTP 404", first=None)]
    assert "warning" not in table(figures(failed, OBJECTIVE, [1.5]), failed, OBJECTIVE)


class Endpoint(BaseHTTPRequestHandler):
    """A model that says two words, slowly, and breaks off when a prompt is long."""

    bodies: list[dict[str, Any]] = []
    running = 0
    most = 0
    together = 1  # answers wait until so many requests have been there at once
    change = threading.Condition()

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.change:
            type(self).bodies.append(body)
            type(self).running += 1
            type(self).most = max(self.most, self.running)
            self.change.notify_all()
            self.change.wait_for(lambda: self.most >= self.together, 20)
        if body["max_tokens"] == 14:
            self._answer(json.dumps({"error": {"message": "too long"}}).encode(), 400)
            return
        time.sleep(0.05)
        events: list[Any] = [{"choices": [{"text": "hello"}]}, {"choices": [{"text": " you"}]}]
        details = {"prompt_tokens_details": {"cached_tokens": 4}}
        usage = {"prompt_tokens": 8, "completion_tokens": 2, **details}
        events.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        with self.change:
            type(self).running -= 1
        self._answer((text + ("" if body["max_tokens"] == 13 else "data: [DONE]\n\n")).encode())

    def _answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.bodies, Endpoint.running, Endpoint.most, Endpoint.together = [], 0, 0, 1
    with serving(Endpoint) as address:
        yield address


def test_closed_loop_over_two_processes_keeps_its_concurrency(
    endpoint: str, tmp_path: Path
) -> None:
    Endpoint.together = 3
    results = tmp_path / "results.jsonl"
    size = ["--requests", "12", "--input-tokens", "40", "--prefix-tokens", "20"]
    result = radixgrove(
        *("bench", "serve", "--url", endpoint, "--concurrency", "3", "--processes", "2", *size),
        *("--output-tokens", "2", "--results", str(results), "--workload", "small"),
    )
    assert result.returncode == 0, result.stderr
    assert len(Endpoint.bodies) == 12
    assert len({body["prompt"] for body in Endpoint.bodies}) == 12
    assert Endpoint.most == 3
    assert all(body["stream"] and body["ignore_eos"] for body in Endpoint.bodies)
    rows = {row["metric"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert rows["hit rate"]["value"] == 0.5
    assert rows["ttft p50"]["value"] >= 50
    assert rows["requests"]["workload"] == "small"
    keys = {"benchmark", "workload", "model", "subject", "metric", "value", "unit"}
    assert keys | {"device", "commit", "date"} == rows["requests"].keys()


def test_token_ids_of_a_trace_are_sent_as_they_are(endpoint: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"token_ids": [%d, 2], "output_length": 3, "seed": %d}\n'
    trace.write_text(line % (1, 10) + line % (4, 11))
    options = ("--url", endpoint, "--trace", str(trace), "--concurrency", "2")
    result = radixgrove("bench", "serve", *options, "--temperature", "0.5")
    assert result.returncode == 0, result.stderr
    sent = sorted((b["prompt"], b["seed"], b["max_tokens"]) for b in Endpoint.bodies)
    assert sent == [([1, 2], 10, 3), ([4, 2], 11, 3)]
    assert all(body["temperature"] == 0.5 for body in Endpoint.bodies)
    refused = radixgrove("bench", "serve", *options, "--chat")
    assert refused.returncode == 2


def test_open_loop_does_not_wait_for_answers(endpoint: str) -> None:
    Endpoint.together = 4
    result = radixgrove(
        *("bench", "serve", "--url", endpoint, "--rate", "200", "--requests", "20"),
        *("--input-tokens", "4", "--prefix-tokens", "0", "--output-tokens", "2"),
    )
    assert result.returncode == 0, result.stderr
    assert Endpoint.most >= 4


def test_a_stream_that_breaks_off_is_a_failure(endpoint: str) -> None:
    result = radixgrove(
        "bench", "serve", "--url", endpoint, "--requests", "2", "--output-tokens", "13"
    )
    assert result.returncode == 1
    assert "failed: 2 x cut short" in result.stdout


def test_a_refusal_is_shown_with_the_servers_reason(endpoint: str) -> None:
    result = radixgrove(
        "bench", "serve", "--url", endpoint, "--requests", "2", "--output-tokens", "14"
    )
    assert result.returncode == 1
    assert "failed: 2 x HTTP 400, such as: too long\n" in result.stdout


def test_a_prefix_longer_than_the_input_is_a_wrong_value(endpoint: str) -> None:
    result = radixgrove("bench", "serve", "--url", endpoint, "--input-tokens", "64")
    assert result.returncode == 2
    assert "--prefix-tokens 256, must be shorter than the input, --input-tokens 64" in result.stderr


def test_two_loops_at_once_are_refused() -> None:
    result = radixgrove("bench", "serve", "--rate", "1", "--concurrency", "1")
    assert result.returncode == 2
