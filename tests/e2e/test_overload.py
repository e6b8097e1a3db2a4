"""Far more requests than one small worker can hold, through two frontends that share its port, and
the end of such a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import UpProcess, chat_body, wait_idle

# A machine that is busy with other tests may take longer than 30 s for a stream.
SETTINGS = """
replicas: 1
worker: {frontends: 2, max_running: 2, max_queued: 4, drain_timeout: 120}
router: {drain_timeout: 120}
"""
REQUESTS = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[UpProcess]:
    directory = tmp_path_factory.mktemp("overload")
    config = directory / "settings.yaml"
    config.write_text(SETTINGS)
    up = UpProcess(directory / "log", ("--config", str(config)))
    try:
        up.start()
        yield up
    finally:
        up.kill()


def test_every_request_of_an_overload_ends(small: UpProcess) -> None:
    worker = small.status()["replicas"][0]["url"]

    def ask(number: int) -> httpx.Response:
        url = (worker, small.url)[number % 2]
        body = chat_body(f"Count to {number}.", max_tokens=4)
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, verify=False)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {200, 429, 503}
    assert statuses[200] >= 6  # what fits into the batch and the queue
    assert statuses[429] + statuses[503] > 0, "the queue is bounded"
    for answer in answers:
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"]
    wait_idle(small)
    for url in (worker, small.url):
        wait_until(partial(_is_ready, url), what=f"{url} to be ready")
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat_body("Hello"), timeout=60, verify=False
        )
        assert answer.status_code == 200


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=30, verify=False).status_code == 200


def test_ctrl_c_lets_streams_end_and_leaves_nothing(small: UpProcess) -> None:
    """The last test of this file: the cluster is gone then."""
    body = chat_body("Tell a story.", max_tokens=60, stream=True, ignore_eos=True)

    def stream() -> str:
        url = f"{small.url}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=120, verify=False).text

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        wait_until(lambda: small.status()["in_flight"] == 1, what="the stream at the router")
        small.stop()
        text = running.result(timeout=30)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
