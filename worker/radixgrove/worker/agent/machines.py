"""The machines of a group of several members: how their agents meet, and stay together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from radixgrove.worker.agent.preparation import AgentError
from radixgrove.worker.agent.relay import Relay
from radixgrove.worker.cache.identity import block_hasher, cache_namespace
from radixgrove.worker.parallel.channel import Channel, digest
from radixgrove.worker.parallel.identity import Identity
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.rendezvous import (
    Gathering,
    JoinRefused,
    MeetingPoint,
    Party,
    RankMissing,
    join,
)
from radixgrove.worker.runtime import Runtime

T = TypeVar("T")


class Machines:
    """The others, as machine 0 has them: a relay to each, once it has joined."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._layout = Layout.of(runtime.settings)
        self._relays: list[Relay] = []
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Let them in, then pass on what is said, until one of them is lost.

        Raises:
            AgentError: one did not come, or is lost; the message names it.
        """
        for node, channel in (await _in_thread(self._gather)).items():
            members = self._layout.members_of(node)
            ranks = ", ".join(map(str, self._layout.ranks_of(node)))
            name = f"machine {node} ({channel.peer}; ranks {ranks})"
            relay = Relay(
                self._runtime,
                channel,
                self._runtime.engine_sockets(members),
                self._runtime.peer_sockets(members),
                _saying(self._lost, partial(_obituary, name)),
            )
            self._relays.append(relay)
            relay.start()
        raise AgentError(await self._lost)

    def _gather(self) -> dict[int, Channel]:
        point = MeetingPoint.at(self._runtime.settings.master)
        party = Party.of_machines(self._layout)
        try:
            return Gathering(point, _identity(self._runtime), party).wait(point.arrival)
        except RankMissing as error:
            raise AgentError(str(error)) from error
        except OSError as error:
            raise AgentError(f"machine 0 cannot listen at {point}: {error.strerror}") from error

    async def close(self, why: str) -> None:
        """End them all: in order, or because of `why`."""
        await asyncio.gather(*(asyncio.to_thread(relay.close, why) for relay in self._relays))


async def join_machine_0(runtime: Runtime, over: asyncio.Future[str]) -> Relay:
    """This machine's side: a relay to machine 0, once that has let it in.

    Args:
        over: gets why the group has ended, or how machine 0 was lost; empty: in order.

    Raises:
        AgentError: it was not there in time, or does not take this machine.
    """
    settings, layout = runtime.settings, Layout.of(runtime.settings)
    point, node = MeetingPoint.at(settings.master), settings.node_rank

    def enter() -> Channel:
        party = Party.of_machines(layout)
        return join(point, _identity(runtime), node, point.arrival, party)

    try:
        channel = await _in_thread(enter)
    except (RankMissing, JoinRefused) as error:
        raise AgentError(str(error)) from error
    members = layout.members_of(node)
    inlets, outlets = runtime.peer_sockets(members), runtime.engine_sockets(members)
    relay = Relay(runtime, channel, inlets, outlets, _saying(over, lambda why: why))
    relay.start()
    return relay


def _identity(runtime: Runtime) -> Identity:
    """As of ranks, and with what engines elsewhere must have in common with publishers here."""
    settings = runtime.settings
    identity = Identity.of(settings, runtime.model_dir)
    hasher = block_hasher(settings, cache_namespace(settings, "", ""))
    common = f"{identity.settings} {settings.frontends} {settings.redis_url is not None}"
    return replace(
        identity,
        token=digest(identity.token, b"machines"),
        settings=digest(hasher.root, common.encode()).hex(),
    )


def _obituary(name: str, why: str) -> str:
    return f"{name}: {why or 'it has ended'}"


def _saying(future: asyncio.Future[str], words: Callable[[str], str]) -> Callable[[str], None]:
    """What a relay's thread calls: the future gets its words, the first time."""
    loop = asyncio.get_running_loop()

    def settle(why: str) -> None:
        if not future.done():
            future.set_result(words(why))

    def say(why: str) -> None:
        loop.call_soon_threadsafe(settle, why)

    return say


async def _in_thread(call: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, for what may take minutes: the end of the process does not wait."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        with suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
            try:
                found = call()
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(found)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)
