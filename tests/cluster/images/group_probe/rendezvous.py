"""The ranks of a group: they meet over Gloo, feel each other's pulse, and end together."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_MEETING = 300.0  # seconds for all ranks to come: images are pulled meanwhile
_PULSE_EVERY = 0.2
_PULSE_TIMEOUT = 10.0  # a rank that is silent this long is lost


class PeerLost(Exception):
    """A rank does not answer any more."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in its group, from nothing but the operator's environment."""

    rank: int
    nodes: int
    master: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place:
        """Raises KeyError for a missing variable, ValueError for variables that disagree."""
        nodes, ranks = int(environ["NNODES"]), int(environ["WORLD_SIZE"])
        if ranks != nodes * int(environ["NPROC_PER_NODE"]):
            raise ValueError(f"WORLD_SIZE is {ranks}, which is not NNODES * NPROC_PER_NODE")
        rank = int(environ["NODE_RANK"])
        if not 0 <= rank < nodes:
            raise ValueError(f"NODE_RANK is {rank}, of {nodes} nodes")
        return cls(rank, nodes, environ["MASTER_ADDR"])


class Rendezvous:
    """One process of each node; port and network interface are read by torch and Gloo themselves.

    `join`, then `pulse` in a thread of its own until it returns or raises.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._finished = threading.Event()

    def join(self) -> None:
        """Meets all ranks, and checks that each is there once. Raises PeerLost when they do not."""
        place, patience = self._place, timedelta(seconds=_MEETING)
        _await_name(place.master)
        try:
            # MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME come from the environment.
            dist.init_process_group(
                "gloo", rank=place.rank, world_size=place.nodes, timeout=patience
            )
            self._pulse = dist.new_group(timeout=timedelta(seconds=_PULSE_TIMEOUT))
            present = torch.zeros(place.nodes)
            present[place.rank] = 1
            dist.all_reduce(present)
        except RuntimeError as error:
            raise PeerLost(f"the group did not meet: {error}") from error
        if not bool((present == 1).all()):
            raise PeerLost(f"ranks are missing or there twice: {present.tolist()}")

    def pulse(self) -> None:
        """Returns once rank 0 has finished. Raises PeerLost."""
        while True:
            done = torch.tensor([float(self._finished.is_set())])
            try:
                dist.all_reduce(done, group=self._pulse)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
            if done.item():
                return
            time.sleep(_PULSE_EVERY)

    def finish(self) -> None:
        """Said by rank 0 when it has drained: the whole group ends."""
        self._finished.set()


def _await_name(name: str, resolve: Callable[[str, None], object] = socket.getaddrinfo) -> None:
    """A headless Service's names appear some time after its pods."""
    deadline = time.monotonic() + _MEETING
    while True:
        try:
            resolve(name, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise PeerLost(f"{name} does not resolve: {error}") from error
            time.sleep(0.2)
