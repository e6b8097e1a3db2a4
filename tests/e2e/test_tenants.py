"""Tenants of one cluster under eviction pressure: none sees what another has cached.

The same prompts come from several tenants, in a pool far too small for them. Whatever a client can
observe without a clock (reported cached tokens, the router's expectation, the text) must follow
from that tenant's own past alone. The control run shares the cache: there the observables tell.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import MODEL, UpProcess
from tests.worker.execution import tiny

PAGE = 16
KV_TOKENS = 1024
TENANTS = ("alice", "bob", "carol")
SHARED_TEXT = "The committee met again on Tuesday to talk about the plan for the harbour. " * 8


def canary(name: str) -> str:
    return f"{name}-{random.Random(name).getrandbits(40):010x}"


# Two prompts that all send, and one of each tenant that the others come to guess word by word.
PROMPTS = [
    SHARED_TEXT,
    "Minutes of the meeting. " + SHARED_TEXT,
    *(f"Our secret is {canary(tenant)}. " + SHARED_TEXT for tenant in TENANTS),
]


@dataclass
class Seen:
    """What one request showed of the caches."""

    cached_tokens: int
    matched_tokens: int
    text: str
    prompt_ids: list[int]
    ids: list[int]  # of prompt and answer


def common_prefix(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Client:
    """One tenant, who knows what it sent itself."""

    def __init__(self, up: UpProcess, tenant: str, salt: str | None = None) -> None:
        self._url = f"{up.url}/v1/completions"
        self._headers = {"authorization": f"Bearer key-{tenant}", "x-radixgrove-debug": "1"}
        self._salt = salt
        self.past: list[list[int]] = []

    def ask(self, prompt: str) -> Seen:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        body |= {"return_token_ids": True} | ({"cache_salt": self._salt} if self._salt else {})
        answer = httpx.post(self._url, json=body, headers=self._headers, timeout=60, verify=False)
        choice = answer.raise_for_status().json()["choices"][0]
        return Seen(
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
            int(answer.headers["x-radixgrove-matched-tokens"]),
            choice["text"],
            choice["prompt_token_ids"],
            choice["prompt_token_ids"] + choice["token_ids"],
        )

    def bound(self, prompt_ids: list[int]) -> int:
        """The most that this tenant's own past can have cached of a prompt."""
        longest = max((common_prefix(prompt_ids, old) for old in self.past), default=0)
        return min(longest, len(prompt_ids) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Path:
    """A small model with the demo model's tokenizer: what counts is which pages are found."""
    directory = tmp_path_factory.mktemp("models") / MODEL
    vocab = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json")).get_vocab_size()
    tiny.save("llama", directory, vocab_size=vocab, max_position_embeddings=512)
    for file in demo_model_dir.glob("*token*"):
        shutil.copy(file, directory)
    return directory


@contextmanager
def cluster(tmp_path: Path, model_dir: Path, *arguments: str) -> Iterator[UpProcess]:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{tenant}: key-{tenant}\n" for tenant in TENANTS))
    options = ("--api-keys-file", str(keys), "--replicas", "1", "--max-model-len", "512")
    pool = ("--kv-tokens", str(KV_TOKENS))
    model = ("--model", str(model_dir))
    up = UpProcess(tmp_path / "log", (*model, *options, *pool, *arguments))
    try:
        up.start()
        yield up
    finally:
        up.kill()


def engine_counter(up: UpProcess, name: str) -> float:
    url = up.status()["replicas"][0]["url"]
    text = httpx.get(
        f"{url}/metrics", headers={"authorization": "Bearer key-alice"}, verify=False
    ).text
    lines = [line for line in text.splitlines() if line.startswith(f"radixgrove_engine_{name}_")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize(
    ("host_gib", "rounds"),
    [
        pytest.param(0, 4, marks=pytest.mark.slow, id="device"),
        pytest.param(0.25, 2, id="host tier"),
    ],
)
def test_private_caches_show_nothing_of_each_other(
    host_gib: float, rounds: int, tmp_path: Path, model_dir: Path
) -> None:
    order = random.Random(7)
    with cluster(tmp_path, model_dir, "--host-cache-gib", str(host_gib)) as up:
        clients = {tenant: Client(up, tenant) for tenant in TENANTS}
        clients["alice, salted"] = Client(up, "alice", salt="pepper")
        texts: dict[str, set[str]] = defaultdict(set)
        hits: dict[str, int] = dict.fromkeys(clients, 0)
        for _ in range(rounds):
            turns = [(name, prompt) for name in clients for prompt in PROMPTS]
            order.shuffle(turns)
            for name, prompt in turns:
                client = clients[name]
                for _again in range(order.choice((1, 2))):
                    seen = client.ask(prompt)
                    bound = client.bound(seen.prompt_ids)
                    assert seen.cached_tokens <= bound, (name, prompt[:40], seen)
                    assert seen.matched_tokens <= bound, (name, prompt[:40], seen)
                    client.past.append(seen.ids)
                    texts[prompt].add(seen.text)
                    hits[name] += seen.cached_tokens > 0
        assert engine_counter(up, "evicted_pages") > 0
        assert (engine_counter(up, "loaded_pages") > 0) == (host_gib > 0)
        assert all(hits.values()), "every tenant finds its own"
        for prompt, answers in texts.items():
            assert len(answers) == 1, "the answer does not depend on who asks, or on the cache"
            strangers = [canary(tenant) for tenant in TENANTS if canary(tenant) not in prompt]
            assert not any(secret in answer for secret in strangers for answer in answers)


def test_shared_cache_does_show_it(tmp_path: Path, model_dir: Path) -> None:
    with cluster(tmp_path, model_dir, "--sharing", "shared") as up:
        alice, bob = Client(up, "alice"), Client(up, "bob")
        assert alice.ask(PROMPTS[0]).cached_tokens == 0
        assert bob.ask(PROMPTS[0]).cached_tokens > 0
        assert Client(up, "bob", salt="pepper").ask(PROMPTS[0]).cached_tokens == 0
