"""What an engine says of a prompt before it is given it."""

from __future__ import annotations

from radixgrove.worker.messages import Peek, Peeked
from tests.worker.scheduler.harness import Harness, pack, request

COMMON = [(7 * i) % 50 for i in range(60)]  # 15 pages


def peek(harness: Harness, tokens: list[int], domain: str = "public") -> Peeked:
    before = harness.stats()
    said = harness.scheduler.peek(
        Peek(peek_id="p", frontend=0, token_ids=pack(tokens), domain=domain)
    )
    assert harness.stats() == before
    harness.scheduler.check()
    return said


def test_cached_pages_match_in_their_domain_alone_and_never_the_last_token() -> None:
    harness = Harness()
    assert peek(harness, COMMON).matched_tokens == 0
    harness.submit(request("first", COMMON, 2))
    harness.run()
    assert peek(harness, [*COMMON, 1]).matched_tokens == 60
    assert peek(harness, COMMON).matched_tokens == 56
    assert peek(harness, [*COMMON[:20], 49, 49, 49]).matched_tokens == 20
    assert peek(harness, [1]).matched_tokens == 0
    assert peek(harness, COMMON, domain="another").matched_tokens == 0


def test_what_another_request_computes_matches_too() -> None:
    harness = Harness(max_step_tokens=16)
    harness.submit(request("first", COMMON, 2))
    assert peek(harness, [*COMMON, 1]).queued_tokens == 60, "it waits"
    harness.step()
    said = peek(harness, [*COMMON, 1])
    assert (said.matched_tokens, said.queued_tokens, said.running) == (60, 60 - 16, 1)


def test_requests_that_wait_for_anothers_prefix_are_no_load() -> None:
    harness = Harness(max_step_tokens=16)
    for index in range(4):
        harness.submit(request(f"r{index}", COMMON, 2))
    harness.step()
    assert harness.stats().waiting_tokens > 100
    assert peek(harness, [*COMMON, 1]).queued_tokens == 60 - 16 + 3 * 4
