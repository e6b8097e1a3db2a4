"""The executor that a scheduler drives: one rank's runner, or all ranks' of a member."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.engine.ending import give_up
from radixgrove.worker.engine.group_links import LeaderLinks
from radixgrove.worker.engine.leader import GroupExecutor
from radixgrove.worker.engine.steps import step_allowance
from radixgrove.worker.execution.assembly import Report
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.messages import EngineInfo
from radixgrove.worker.parallel.crew import Crew, meet
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.member import Member, StorePlace, form, open_store
from radixgrove.worker.plan import Executor


def build_executor(
    settings: WorkerSettings,
    model_dir: Path,
    report: Report,
    runtime_dir: Path | None = None,
    rank: int = 0,
) -> tuple[Executor, EngineInfo]:
    """A leader's executor: load the model, size the pool, warm up, capture.

    Args:
        runtime_dir: where ranks meet; needed when the member has several.
        rank: the leader's.

    Raises:
        ModelError: the model, or the settings for it, cannot be served; the message says why.
        RankMissing: another rank did not come, or is lost.
    """
    if Layout.of(settings).ranks_per_member == 1:
        return build_rank(settings, model_dir, report, rank)
    group = _Group(settings, model_dir, runtime_dir, rank)
    try:
        runner, info = build_rank(settings, model_dir, report, rank, group.form)
    except RuntimeError as error:
        raise group.blame(error) from error
    allowance = step_allowance(settings, info)
    return GroupExecutor(runner, group.links, allowance, compare=settings.compare_ranks), info


class _Group:
    """The leader's side of a member's start."""

    def __init__(
        self, settings: WorkerSettings, model_dir: Path, runtime_dir: Path | None, rank: int
    ) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._directory = runtime_dir
        self._rank = rank
        self._links: LeaderLinks | None = None

    @property
    def links(self) -> LeaderLinks:
        assert self._links is not None
        return self._links

    def form(self, device: torch.device) -> Member:
        """Meet the others, then let torch form its groups."""
        if self._directory is None:
            raise ValueError("several ranks need a runtime directory to meet in")
        crew = meet(self._settings, self._model_dir, self._directory, self._rank)
        self._links = LeaderLinks(crew, give_up(self._rank))
        listener = _store_listener(crew)
        address = listener.getsockname()[:2] if listener is not None else ()
        self._links.send(StorePlace(*address))
        store = open_store(crew.layout, crew.place.member, self._directory, listener)
        transport = self._settings.transport
        address = crew.own_address
        member = form(crew.layout, crew.place, device, store, transport, address)
        self._links.activity = member.activity
        return member

    def blame(self, error: RuntimeError) -> RuntimeError:
        return error if self._links is None else self._links.blame(error)


def _store_listener(crew: Crew) -> socket.socket | None:
    """On the network of the group; None for a member on one machine."""
    if not crew.layout.members_straddle:
        return None
    family = socket.AF_INET6 if ":" in crew.own_address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((crew.own_address, 0))
    listener.listen(crew.layout.ranks_per_member)
    return listener
