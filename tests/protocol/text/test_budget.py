"""Texts encoded at once: bounded, in order, and dropped with their clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from radixgrove.protocol.text.budget import EncodingBudget

Work = Callable[[Callable[[], None]], str]


class Gate:
    """Work that begins, and ends when it may."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.saw_its_end = False

    def __call__(self, check: Callable[[], None]) -> str:
        self.began.set()
        assert self.may_end.wait(20)
        try:
            check()
        except Exception:
            self.saw_its_end = True
            raise
        return "done"


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.began.wait, 20)


async def test_what_does_not_fit_waits_in_its_order() -> None:
    budget = EncodingBudget(100)
    gates = [Gate() for _ in range(3)]
    sizes = (60, 60, 10)  # the last would fit beside the first, and is not let past the second
    tasks = [
        asyncio.create_task(budget.run(size, gate)) for size, gate in zip(sizes, gates, strict=True)
    ]
    await begun(gates[0])
    assert not gates[1].began.is_set()
    assert not gates[2].began.is_set()
    for gate in gates:
        gate.may_end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 3


async def test_one_that_is_larger_than_all_goes_alone() -> None:
    budget = EncodingBudget(100)
    gate = Gate()
    gate.may_end.set()
    assert await asyncio.wait_for(budget.run(1000, gate), 20) == "done"
    assert await asyncio.wait_for(budget.run(100, gate), 20) == "done"


async def test_what_is_cancelled_while_it_waits_never_begins() -> None:
    budget = EncodingBudget(100)
    first, second, third = Gate(), Gate(), Gate()
    running = asyncio.create_task(budget.run(80, first))
    await begun(first)
    waiting = asyncio.create_task(budget.run(80, second))
    behind = asyncio.create_task(budget.run(20, third))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    third.may_end.set()
    assert await asyncio.wait_for(behind, 20) == "done"
    first.may_end.set()
    assert await running == "done"
    assert not second.began.is_set()


async def test_what_runs_ends_at_its_next_look_and_gives_back_then() -> None:
    budget = EncodingBudget(100)
    abandoned, after = Gate(), Gate()
    running = asyncio.create_task(budget.run(100, abandoned))
    await begun(abandoned)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    following = asyncio.create_task(budget.run(100, after))
    await asyncio.sleep(0)
    assert not after.began.is_set()
    abandoned.may_end.set()
    after.may_end.set()
    assert await asyncio.wait_for(following, 20) == "done"
    assert abandoned.saw_its_end
