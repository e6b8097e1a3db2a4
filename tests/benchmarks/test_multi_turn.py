"""The benchmark of the host tier sends whole histories in turn, and says what it measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from benchmarks.load import multi_turn
from radixgrove.cli.bench.sender import Sample, open_session
from tests.conftest import serving

CLIENTS, ROUNDS, NEW, OUTPUT = 5, 3, 6, 2
VOCABULARY = 1000


class Endpoint(BaseHTTPRequestHandler):
    """A model that answers with the prompt's length and a sum of it; one prompt at a time fails."""

    prompts: list[list[int]] = []
    failing = 0  # the length of prompts that get an error
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["prompt"]
        with self.lock:
            self.prompts.append(prompt)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "", "token_ids": [], "prompt_token_ids": prompt}]},
            *({"choices": [{"text": "", "token_ids": [token]}]} for token in answer(prompt)),
            {"choices": [], "usage": usage},
        ]
        lines = [*(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
        content = "".join(f"{line}\n\n" for line in lines).encode()
        self.send_response(500 if len(prompt) == self.failing else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answer(prompt: list[int]) -> list[int]:
    return [len(prompt), sum(prompt) % VOCABULARY]


@pytest.fixture
def url() -> Iterator[str]:
    Endpoint.prompts.clear()
    Endpoint.failing = 0
    with serving(Endpoint) as address:
        yield address


async def converse(url: str, in_flight: int) -> list[list[Sample]]:
    workload = multi_turn.MultiTurn(CLIENTS, ROUNDS, NEW, OUTPUT)
    async with open_session(10.0) as session:
        endpoint = multi_turn.Endpoint(session, url, "m")
        samples: list[list[Sample]] = await multi_turn.converse(
            endpoint, workload, in_flight, VOCABULARY
        )
    return samples


# More in flight than clients: a client's next turn must wait for its last.
@pytest.mark.parametrize("in_flight", [1, 3, 2 * CLIENTS])
async def test_a_turn_is_the_whole_history_and_new_tokens(url: str, in_flight: int) -> None:
    rounds = await converse(url, in_flight)
    assert [len(samples) for samples in rounds] == [CLIENTS] * ROUNDS
    assert (
        sum(map(len, Endpoint.prompts))
        == multi_turn.MultiTurn(CLIENTS, ROUNDS, NEW, OUTPUT).prompt_tokens
    )
    by_length = sorted(Endpoint.prompts, key=len)
    first = by_length[:CLIENTS]
    for number in range(1, ROUNDS):
        histories = [prompt + answer(prompt) for prompt in first]
        first = by_length[number * CLIENTS : (number + 1) * CLIENTS]
        assert sorted(prompt[:-NEW] for prompt in first) == sorted(histories)


async def test_one_in_flight_takes_the_clients_in_turn(url: str) -> None:
    await converse(url, 1)
    beginnings = [tuple(prompt[:NEW]) for prompt in Endpoint.prompts]
    assert beginnings == beginnings[:CLIENTS] * ROUNDS
    assert len(set(beginnings)) == CLIENTS


async def test_a_failed_request_ends_the_run(url: str) -> None:
    Endpoint.failing = 2 * NEW + OUTPUT
    with pytest.raises(ExceptionGroup) as caught:
        await converse(url, 1)
    assert caught.group_contains(RuntimeError, match="HTTP 500")


def test_a_summary_leaves_the_first_round_out_but_of_the_wall_time() -> None:
    def sample(sent: float, first: float, cached: int) -> Sample:
        return Sample(
            sent=sent,
            late=0.0,
            first=first,
            total=first + 0.4,
            prompt_tokens=100,
            cached_tokens=cached,
            output_tokens=5,
        )

    summary = multi_turn.Summary.of(
        [[sample(1.0, 9.0, 0)], [sample(20.0, 0.3, 50), sample(21.0, 0.1, 100)]]
    )
    assert summary.ttft == [0.1, 0.3]
    assert summary.hit_share == 0.75
    assert summary.per_later_token == pytest.approx(0.1)
    assert summary.wall == pytest.approx(20.5)


@pytest.mark.parametrize(("prefix", "pool"), [(32_768, 139_264), (256, 768), (100, 1)])
def test_prefixes_in_turn_leave_nothing_of_one_when_it_comes_again(prefix: int, pool: int) -> None:
    count = multi_turn.prefix_count(prefix, pool)
    assert (count - 1) * prefix >= pool > (count - 2) * prefix


def test_a_prefix_that_was_elsewhere_is_reported() -> None:
    def visits(cached: int, loaded: int) -> Any:
        sample = Sample(sent=0.0, late=0.0, total=0.2, cached_tokens=cached)
        return multi_turn.Visits("from the host", 64, 4, [sample], loaded)

    assert not visits(64, 4).misplaced
    assert visits(48, 4).misplaced
    assert visits(64, 3).misplaced, "it was on the GPU still"
    assert visits(64, 4).ttft == 0.2
