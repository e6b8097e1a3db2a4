"""A test fails for the tasks that it leaves, each of which is named once."""

from __future__ import annotations

import asyncio

import pytest

from tests.forgotten import forgotten_tasks


async def fails() -> None:
    raise ValueError("unheard")


async def goes_on() -> None:
    await asyncio.Event().wait()


async def ends() -> None:
    pass


@pytest.mark.parametrize(
    ("left", "words"), [(fails, ["ValueError('unheard')"]), (goes_on, ["pending"]), (ends, [])]
)
def test_tasks_of_a_closed_loop_that_would_complain_are_named_once(
    left: object, words: list[str]
) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(left())  # type: ignore[operator]
    loop.run_until_complete(asyncio.sleep(0))
    assert forgotten_tasks() == [], "it may still be waited for"
    loop.close()
    found = forgotten_tasks()
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
    assert forgotten_tasks() == []
    assert task.get_loop() is loop


def test_a_failure_that_was_heard_is_forgotten() -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(fails())
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    assert isinstance(task.exception(), ValueError)
    assert forgotten_tasks() == []
