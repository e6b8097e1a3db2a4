"""The process around the handlers."""

from __future__ import annotations

import asyncio
import gc
import getpass
import itertools
import threading
from collections.abc import Collection
from typing import Any, cast

import kopf
import pytest
from kopf._core.reactor import running

from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.controller import main
from radixgrove.operator.controller.app import App

CONFIG = OperatorConfig.model_validate(
    {
        "namespace": "home",
        "images": {"worker": "w", "router": "r", "operator": "o"},
        "redis": {"url": "redis://redis"},
        "router": {"url": "http://router/v1", "labels": {}},
    }
)


def test_a_watch_that_the_server_forgot_ends_and_none_ends_for_good() -> None:
    settings = main.kopf_settings()
    watching = settings.watching
    assert watching.server_timeout is not None
    assert watching.client_timeout is not None
    assert watching.server_timeout < watching.client_timeout
    assert settings.scanning.disabled
    waits = itertools.islice(settings.networking.error_backoffs, 1000)  # type: ignore[arg-type]
    assert max(waits) <= 5.0


def test_no_handler_puts_a_finalizer_or_an_annotation_on_anything() -> None:
    """Handlers of raw events alone: kopf keeps no state for them, and a kind without is ignored."""
    registry = kopf.OperatorRegistry()
    main.register(registry, cast(App, None))
    assert len(registry._watching.get_all_handlers()) == len(main.WATCHED) + 2
    for others in (registry._changing, registry._spawning, registry._webhooks):
        assert list(others.get_all_handlers()) == []


class _Beating:
    def beat(self) -> None:
        pass


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    left = set(tasks)
    while left:  # kopf's cleanup can take a cancellation for that of what it waits for
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_watches_as_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's numeric user has none, and kopf asks for it unless it is given an identity."""
    made: list[asyncio.Task[Any]] = []
    current = asyncio.current_task()

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    async def end_at_once(tasks: Collection[asyncio.Task[Any]], **_: Any) -> None:
        made.extend(tasks)
        await _end(tasks)

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(running, "run_tasks", end_at_once)
    stop = threading.Event()
    await main.watch(cast(App, _Beating()), CONFIG, stop)
    assert made, "kopf got as far as its tasks"
    assert stop.is_set(), "whatever ends the watches ends the operator"
    # Tasks that kopf forgot complain now. Python 3.11 fails to parse what another test parses, if
    # such a complaint, which formats a traceback and so parses too, comes in the middle of it.
    made.clear()
    await _end(asyncio.all_tasks() - {current})
    gc.collect()


@pytest.mark.parametrize(
    ("text", "addresses"),
    [("", []), ("10.0.0.7", ["10.0.0.7"]), ("fd00::7,10.0.0.7", ["fd00::7", "10.0.0.7"])],
)
def test_the_addresses_of_its_own_pod_tell_what_the_cluster_has(
    text: str, addresses: list[str]
) -> None:
    assert main.with_pod_ips(CONFIG, text).pod_ips == addresses
