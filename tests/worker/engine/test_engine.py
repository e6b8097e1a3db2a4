"""The engine process: what its peers see of it, in good and bad times."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from radixgrove.protocol.blocks import HASH_BYTES
from radixgrove.worker.cache.identity import block_hasher, cache_namespace
from radixgrove.worker.engine import links
from radixgrove.worker.engine.links import FrontendOutlet, Outlet
from radixgrove.worker.messages import (
    Abort,
    Admitted,
    CacheEvents,
    CacheSnapshot,
    EngineInfo,
    EngineState,
    Finish,
    FlushCache,
    Outputs,
    PhaseReport,
    PublishSnapshot,
    RefusalReason,
    Refused,
    Stats,
    SubmitChoices,
    Tokens,
)
from tests.worker.engine.conftest import PATIENCE, EngineProcess, StartEngine
from tests.worker.scheduler.fake_executor import expected_output
from tests.worker.scheduler.harness import pack, request

PROMPT = list(range(20))
REDIS = {"redis_url": "redis://127.0.0.1:1"}  # the engine only needs to know that there is one


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, request("", prompt, count).sampling, 50)


def test_answers_requests_of_several_frontends_each_at_its_own_socket(
    start_engine: StartEngine,
) -> None:
    engine = start_engine({"frontends": 2})
    for index in range(6):
        engine.send(request(f"r{index}", [*PROMPT, index], 8, frontend=index % 2))
    engine.until_ended("r0", "r2", "r4", frontend=0)
    assert set(engine.ends) == {"r0", "r2", "r4"}
    engine.until_ended("r1", "r3", "r5", frontend=1)
    for index in range(6):
        assert engine.tokens[f"r{index}"] == answer([*PROMPT, index], 8)
    assert engine.terminate()[0] == 0


def test_choices_of_one_prompt_are_requests_each(start_engine: StartEngine) -> None:
    engine = start_engine()
    first, other = request("a", PROMPT, 8), request("b", PROMPT, 5)
    engine.send(SubmitChoices(first=first, others=[("b", other.sampling)]))
    engine.until_ended("a", "b")
    assert engine.tokens == {"a": answer(PROMPT, 8), "b": answer(PROMPT, 5)}


def test_a_frontend_has_only_so_many_bytes_unread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(links, "MAX_UNREAD_BYTES", 10_000)
    context = zmq.Context()
    peer = context.socket(zmq.PULL)
    peer.set_hwm(0)  # it takes everything, and reads nothing
    peer.bind(f"ipc://{tmp_path}/peer")
    outlet = FrontendOutlet(Outlet(context, f"ipc://{tmp_path}/peer"))
    message = Outputs([Tokens(request_id="r", token_ids=list(range(1000)))])
    size = len(msgspec.msgpack.encode(message))
    sent = 0
    while outlet.send(message):
        sent += 1
    assert sent == 10_000 // size
    outlet.defer_finals({"r"})
    outlet.has_read(size)
    outlet.flush_finals()
    assert not outlet.is_behind
    outlet.has_read(10 * size)
    assert outlet.send(Outputs([Tokens(request_id="r", token_ids=list(range(20_000)))]))  # alone
    assert not outlet.send(message)
    outlet.close()
    peer.close(0)
    context.term()


def test_reports_its_start_and_what_it_can_do(start_engine: StartEngine) -> None:
    engine = start_engine({"max_running": 3}, num_pages=64)
    assert engine.from_agent_socket(PhaseReport).message == "reading nothing"
    info = engine.from_agent_socket(EngineInfo)
    assert info.max_model_len == 64 * 4  # the pool is smaller than the model's length
    assert info.max_running == 3
    assert engine.from_frontend_socket(EngineInfo) == info
    assert engine.from_agent_socket(Stats).state is EngineState.READY


def test_an_idle_engine_keeps_its_pulse(start_engine: StartEngine) -> None:
    engine = start_engine()
    first = engine.next_stats()
    pulses = [engine.next_stats() for _ in range(5)]
    assert all(pulse.step_remaining is None for pulse in pulses)
    ticks = [first.ticks, *(pulse.ticks for pulse in pulses)]
    assert ticks == sorted(set(ticks))
    assert pulses[-1].ticks < 200  # it sleeps between messages


def test_a_step_that_begins_is_announced_with_its_deadline(start_engine: StartEngine) -> None:
    engine = start_engine({"step_timeout": 5.0}, stall_at=1)
    engine.next_stats()
    engine.send(request("r", PROMPT))
    engine.until(lambda: engine.stats is not None and engine.stats.step_remaining is not None)
    assert engine.stats is not None
    # 20 tokens at a twelfth of the measured 1000 tokens a second come on top.
    assert engine.stats.step_remaining is not None
    assert 5.0 < engine.stats.step_remaining < 5.3
    assert engine.stats.steps == 0


def test_a_long_step_after_short_ones_is_announced_with_its_own_deadline(
    start_engine: StartEngine,
) -> None:
    engine = start_engine({"step_timeout": 5.0}, depth=1, stall_from_tokens=50)
    engine.next_stats()
    engine.send(request("short", PROMPT, 400))
    engine.until(lambda: len(engine.tokens.get("short", [])) > 3)
    engine.send(request("long", [7] * 60))
    # 60 tokens at a twelfth of 1000 a second; a watcher that only knew of a decode step's 5 s
    # would take the engine for stuck.
    engine.until(
        lambda: (
            engine.stats is not None
            and engine.stats.step_remaining is not None
            and engine.stats.step_remaining > 5.0 + 0.5
        )
    )


def test_an_abort_ends_a_request_and_frees_its_pages(start_engine: StartEngine) -> None:
    engine = start_engine({"prefix_cache": False}, step_seconds=0.02)
    engine.send(request("r", PROMPT, 400))
    engine.until(lambda: len(engine.tokens.get("r", [])) > 3)
    engine.send(Abort("r"))
    engine.until_ended("r")
    end = engine.ends["r"]
    assert isinstance(end, Tokens)
    assert end.finish is Finish.ABORT
    engine.until(lambda: engine.stats is not None and engine.stats.pages_free == 256)


def evicted_prompt(start_engine: StartEngine, **options: float) -> EngineProcess:
    """An engine of 32 pages; its first prompt, of 25 pages, has left them for the host."""
    engine = start_engine(num_pages=32, num_host_pages=256, **options)
    for index in range(2):
        engine.send(request(f"fill {index}", [index + 1] * 100, 2))
        engine.until_ended(f"fill {index}")
    return engine


def test_what_was_evicted_comes_back_from_the_host_while_others_decode(
    start_engine: StartEngine,
) -> None:
    engine = evicted_prompt(start_engine, step_seconds=0.01)
    engine.send(request("busy", [3] * 8, 12))
    engine.until(lambda: bool(engine.tokens.get("busy")))
    engine.send(request("back", [1] * 100, 2))
    engine.until_ended("busy", "back")
    assert engine.tokens["back"] == answer([1] * 100, 2)
    engine.until(lambda: engine.stats is not None and engine.stats.loaded_pages > 0)
    assert engine.stats is not None
    assert engine.stats.saved_pages >= 50
    assert engine.stats.host_cached_tokens == 4 * engine.stats.loaded_pages


def test_a_plan_of_copies_alone_is_not_measured_as_a_step(start_engine: StartEngine) -> None:
    engine = start_engine(num_host_pages=256)
    engine.send(request("r", PROMPT, 9))
    engine.until_ended("r")
    engine.until(lambda: engine.stats is not None and engine.stats.saved_pages > 0)
    assert engine.next_stats().steps == 10
    assert "radixgrove_engine_step_seconds_count 9.0" in engine.metrics_text()


def test_a_host_that_is_slower_than_computing_is_left_alone(start_engine: StartEngine) -> None:
    engine = evicted_prompt(start_engine, host_rate=900.0)
    engine.send(request("back", [1] * 100, 2))
    engine.until_ended("back")
    assert engine.tokens["back"] == answer([1] * 100, 2)
    stats = engine.next_stats()
    assert (stats.loaded_pages, stats.finished) == (0, 3)


def test_cache_events_name_what_became_matchable(start_engine: StartEngine) -> None:
    engine = start_engine(REDIS)
    engine.send(request("r", PROMPT, 13))
    events = engine.from_agent_socket(CacheEvents)
    assert events.sequence == 1
    settings = engine.runtime.settings
    hasher = block_hasher(settings, cache_namespace(settings, "float32", "fp8_e4m3"))
    chain = hasher.chain(pack(PROMPT + answer(PROMPT, 13)))
    assert events.events[0].hashes == chain[:HASH_BYTES]  # the prompt's one block of 16
    assert engine.from_agent_socket(CacheEvents).events[0].hashes == chain[HASH_BYTES:]
    engine.send(FlushCache())
    removed = engine.from_agent_socket(CacheEvents)
    assert removed.sequence == 3
    assert not removed.events[0].stored


def test_a_snapshot_holds_all_that_is_cached(start_engine: StartEngine) -> None:
    engine = start_engine(REDIS)
    engine.send(PublishSnapshot())
    empty = engine.from_agent_socket(CacheSnapshot)
    assert (empty.events, empty.last) == ([], True)
    engine.send(request("r", PROMPT, 13))
    engine.until_ended("r")
    stored = b""
    while len(stored) < 2 * HASH_BYTES:
        stored += b"".join(e.hashes for e in engine.from_agent_socket(CacheEvents).events)
    engine.send(PublishSnapshot())
    snapshot = engine.from_agent_socket(CacheSnapshot)
    assert snapshot.sequence == 2
    assert b"".join(event.hashes for event in snapshot.events) == stored
    assert engine.from_agent_socket(CacheSnapshot).last


def test_says_whose_prefill_began(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.send(request("r", PROMPT))
    assert engine.from_agent_socket(Admitted).request_ids == ["r"]


def test_a_message_that_is_none_does_no_harm(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.inbox.send(b"\xff not msgpack")
    engine.inbox.send(msgspec.msgpack.encode({"type": "launch-missiles"}))
    engine.send(request("ownerless", PROMPT, frontend=7))
    engine.send(request("r", PROMPT))
    engine.until_ended("r")
    assert engine.tokens["r"] == answer(PROMPT, 4)


def test_a_frontend_that_is_gone_holds_up_nobody(start_engine: StartEngine) -> None:
    engine = start_engine({"frontends": 2})
    engine.frontends[1].close(linger=0)
    for index in range(8):
        engine.send(request(f"lost{index}", [*PROMPT, index], 100, frontend=1))
    engine.send(request("r", PROMPT, 30, frontend=0))
    engine.until_ended("r")
    assert engine.tokens["r"] == answer(PROMPT, 30)


def test_a_frontend_that_does_not_read_loses_its_requests_and_hears_of_it(
    start_engine: StartEngine,
) -> None:
    engine = start_engine({"frontends": 2}, send_queue=128, num_pages=2048, step_seconds=0.004)
    slow = [f"slow {index} {'x' * 200}" for index in range(15)]
    for name in slow:  # 4 kB a step: soon more than the kernel's buffers and the queue take
        engine.send(request(name, PROMPT, 480, frontend=1))
    engine.send(request("r", PROMPT, 480, frontend=0))
    engine.until_ended("r", frontend=0)
    assert engine.tokens["r"] == answer(PROMPT, 480), engine.ends["r"]
    engine.until(lambda: engine.stats is not None and engine.stats.aborted > 0, frontend=0)
    engine.until(lambda: engine.stats is not None and engine.stats.running == 0, frontend=0)
    engine.until_ended(*slow, frontend=1)  # it reads again
    lost = [end for end in engine.ends.values() if isinstance(end, Refused)]
    assert lost
    assert {end.reason for end in lost} == {RefusalReason.INTERNAL}
    engine.send(request("later", PROMPT, 3, frontend=1))
    engine.until_ended("later", frontend=1)
    assert engine.tokens["later"] == answer(PROMPT, 3)


def test_sigterm_tells_every_request_and_ends_cleanly(start_engine: StartEngine) -> None:
    engine = start_engine(step_seconds=0.05)
    for index in range(20):  # some run, some wait
        engine.send(request(f"r{index}", [*PROMPT, index], 400))
    engine.until(lambda: len(engine.tokens) > 0)
    engine.process.terminate()
    engine.until_ended(*(f"r{index}" for index in range(20)))
    assert {end.finish for end in engine.ends.values() if isinstance(end, Tokens)} == {Finish.ABORT}
    assert engine.wait()[0] == 0


def test_a_failed_step_ends_the_engine_with_its_reason(start_engine: StartEngine) -> None:
    engine = start_engine(fail_at=3)
    engine.send(request("r", PROMPT, 20))
    code, stderr = engine.wait()
    assert code == 1
    assert stderr.splitlines()[-1] == "error: engine rank 0 failed to run: rank 1 is gone"


def test_a_failed_start_ends_the_engine_with_its_reason(start_engine: StartEngine) -> None:
    code, stderr = start_engine(fail_to_build=True).wait()
    assert code == 1
    assert stderr.splitlines()[-1].startswith("error: engine rank 0 failed to start: no memory for")


def test_refusals_travel_like_answers(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.send(request("long", [1] * 600))
    engine.until_ended("long")
    end = engine.ends["long"]
    assert isinstance(end, Refused)
    assert end.reason is RefusalReason.TOO_LONG


def test_metrics_are_written_for_the_frontends_to_serve(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.send(request("r", PROMPT, 9))
    engine.until_ended("r")
    engine.until(lambda: engine.stats is not None and engine.stats.finished == 1)
    deadline = time.monotonic() + PATIENCE
    while "radixgrove_engine_generated_tokens_total 9.0" not in engine.metrics_text():
        assert time.monotonic() < deadline
    text = engine.metrics_text()
    assert "radixgrove_engine_kv_pages 256.0" in text
    assert "radixgrove_engine_finished_requests_total 1.0" in text
    assert "radixgrove_engine_step_seconds_count 9.0" in text
    for phase in ("receive", "schedule", "launch", "complete", "deliver"):
        found = re.search(f'phase_cpu_seconds_total{{phase="{phase}"}} (.+)', text)
        assert found is not None
        assert float(found[1]) > 0, phase


@pytest.mark.parametrize(("bound", "least", "most"), [(None, 4, 8), (20, 12, 200)])
def test_prefill_is_dealt_out_by_the_time_that_steps_take(
    start_engine: StartEngine, bound: float | None, least: int, most: int
) -> None:
    """With 1 ms a token, a prompt of 300 takes 5 steps of 64 tokens, or 15 of 20 ms."""
    engine = start_engine({"max_step_ms": bound, "prefix_cache": False}, token_seconds=0.001)
    engine.send(request("row", PROMPT, 400))
    engine.until(lambda: "row" in engine.tokens)
    for index in range(10):  # the engine learns what a step takes
        engine.send(request(f"r{index}", [index, *PROMPT, *PROMPT], 1))
        engine.until_ended(f"r{index}")
    with engine.suspended():
        before = len(engine.tokens["row"])
        engine.send(request("long", PROMPT * 15, 1))
    engine.until_ended("long")
    assert least <= len(engine.tokens["row"]) - before <= most
