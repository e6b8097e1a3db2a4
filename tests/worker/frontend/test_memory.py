"""What requests and answers may take of a frontend's memory, and of what lies before the engine."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from radixgrove.protocol.text.budget import MAX_CHARACTERS
from radixgrove.service.asgi import Message
from radixgrove.worker.frontend import engine_client, generation, unread
from radixgrove.worker.frontend.unread import Unread, size_of
from radixgrove.worker.messages import (
    Outputs,
    Read,
    Submit,
    SubmitChoices,
    ToEngine,
    TokenLogprobs,
    Tokens,
)
from tests.worker.frontend.conftest import Frontend
from tests.worker.frontend.test_housekeeping import request_then_silence, running, scope, until


def test_a_prompt_is_sent_once_however_many_choices(frontend: Frontend) -> None:
    heard: list[ToEngine] = []
    frontend.engine.heard = heard.append
    try:
        answer = frontend.complete("one two three " * 100, n=8, seed=7, max_tokens=1)
    finally:
        frontend.engine.heard = lambda _: None
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(8))
    (sent,) = [message for message in heard if not isinstance(message, Read)]
    assert isinstance(sent, SubmitChoices)
    assert len(msgspec.msgpack.encode(sent)) < 2 * len(sent.first.token_ids) + 4000
    seeds = [sent.first.sampling.seed, *(sampling.seed for _, sampling in sent.others)]
    assert seeds == list(range(7, 15))


async def test_prompts_that_wait_for_the_engine_are_bounded_by_their_bytes(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNANSWERED_BYTES", 6000)
    async with running(demo_model_dir) as (frontend, engine):
        engine.paused.set()
        statuses: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def ask() -> None:
            receive = await request_then_silence(prompt="x " * 1000, stream=False)
            await frontend.app(scope(), receive, send)

        first = asyncio.create_task(ask())  # some 4,000 or 8,000 bytes: alone it may be larger
        await until(lambda: engine.running, "the first request at the engine")
        await asyncio.wait_for(ask(), 30)
        assert statuses == [429]
        engine.paused.clear()
        await asyncio.wait_for(first, 30)
        await asyncio.wait_for(ask(), 30)
        assert statuses == [429, 200, 200]


async def test_the_engine_hears_what_was_read(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_READ_BYTES", 1000)
    heard: list[ToEngine] = []
    async with running(demo_model_dir) as (_, engine):
        engine.heard = heard.append
        await until(lambda: heard, "word of what was read")
    assert isinstance(heard[0], Read)
    assert heard[0].size >= 1000


# ---- answers that nothing reads ----------------------------------------------------------------


async def test_an_answer_that_is_not_read_ends_when_it_takes_too_much(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its client is given up for reading nothing."""
    monkeypatch.setattr(generation, "MAX_STREAM_BYTES", 30_000)
    status = 0

    async def stuck(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body" and status == 200:
            await asyncio.Event().wait()  # the connection's buffers are full of the stream

    async with running(demo_model_dir) as (frontend, engine):

        def wait_for_the_abort(_: Submit, generated: int) -> None:
            if generated == 300:  # far more than is held for it: it does not end by itself
                engine.paused.set()

        engine.script = lambda _: [1000] * 10_000
        engine.interrupt = wait_for_the_abort
        receive = await request_then_silence(max_tokens=1500, logprobs=5)
        handler = asyncio.create_task(frontend.app(scope(), receive, stuck))
        await asyncio.wait_for(handler, 30)
        await until(lambda: not engine.running, "the abort")
        assert len(engine.aborts) == 1
        # What it held is given back: others are not ended for it.
        assert frontend._unread._bytes == 0


@pytest.mark.parametrize("limit", ["MAX_WHOLE_BYTES", "MAX_ALL_BYTES"])
async def test_an_answer_that_is_sent_whole_is_bounded_too(
    limit: str, demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = generation if limit == "MAX_WHOLE_BYTES" else unread
    monkeypatch.setattr(home, limit, 30_000)
    answers: list[Message] = []

    async def send(message: Message) -> None:
        answers.append(message)

    async with running(demo_model_dir) as (frontend, engine):
        engine.script = lambda _: [1000] * 10_000
        receive = await request_then_silence(max_tokens=1500, logprobs=5, stream=False)
        await asyncio.wait_for(frontend.app(scope(), receive, send), 30)
        await until(lambda: not engine.running, "the abort")
        assert answers[0]["status"] == 400
        assert json.loads(answers[1]["body"])["error"]["code"] == "answer_too_large"
        assert frontend._unread._bytes == 0


@dataclass(eq=False)
class Holder:
    most_unread: int = 1000
    unread: int = 0
    ended: bool = False

    def end_unread(self) -> None:
        self.ended = True


def test_the_largest_answer_ends_when_all_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "MAX_ALL_BYTES", 100)
    ledger, small, large = Unread(), Holder(), Holder()
    ledger.add(large, 60)
    ledger.add(small, 30)
    assert not large.ended
    ledger.add(small, 20)
    assert (large.ended, small.ended) == (True, False)
    ledger.give_back(large, 60)
    ledger.add(small, 40)
    assert not small.ended


def test_one_message_may_be_large_by_itself() -> None:
    """A prompt's log-probabilities come at once, and are read at once."""
    ledger, holder = Unread(), Holder()
    ledger.add(holder, 5000)
    assert not holder.ended
    ledger.add(holder, 1)
    assert holder.ended


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_sizes_are_those_of_the_memory(top: int | None) -> None:
    def message(number: int) -> Tokens:
        scores = None
        if top is not None:
            scores = [TokenLogprobs(-0.5, [(number + i, -1.0 - i) for i in range(top)])]
        return Tokens(request_id=f"request-{number}", token_ids=[1000 + number], logprobs=scores)

    data = msgspec.msgpack.encode(Outputs([message(number) for number in range(2000)]))
    tracemalloc.start()
    outputs = msgspec.msgpack.decode(data, type=Outputs)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = sum(map(size_of, outputs.items))
    assert taken / 2.5 < counted < taken * 2.5


# ---- clients that left --------------------------------------------------------------------------


async def test_a_prompt_whose_client_left_is_not_encoded(demo_model_dir: Path) -> None:
    left: list[Callable[[], None] | None] = []

    async def send(_: Message) -> None:
        raise AssertionError("there is no request to answer")

    async with running(demo_model_dir) as (frontend, engine):
        budget = frontend.model.encoder._budget
        await budget._take(MAX_CHARACTERS)  # others are encoded
        receive = await request_then_silence(prompt="x " * 3000)
        handler = asyncio.create_task(frontend.app(scope(left.append), receive, send))
        await until(lambda: budget._waiting, "the prompt to wait")
        leave = left[0]
        assert leave is not None
        leave()
        await asyncio.wait_for(handler, 30)
        assert not budget._waiting
        assert frontend.in_flight == 0
        assert not engine.submits
