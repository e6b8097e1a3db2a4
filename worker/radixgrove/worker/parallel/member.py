"""A rank's part in its member of a group: its shard's collectives, its pipeline's neighbours."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from radixgrove.protocol.settings import Transport
from radixgrove.worker.parallel.activations import DirectLinks, HostLinks, Link, StageLinks
from radixgrove.worker.parallel.group import Activity, Shard, TensorParallel
from radixgrove.worker.parallel.layout import Layout, Place
from radixgrove.worker.parallel.peer_memory import PeerMail, end_groups, is_possible

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Loading and compiling differ between ranks; collectives of a running step have a shorter deadline.
START_SECONDS = 600.0


class StorePlace(msgspec.Struct, array_like=True, tag=True):
    """Where the leader has torch's store; no address: in the worker's directory."""

    address: str = ""
    port: int = 0


class Member:
    """A rank's membership: of a stage (`tensor`), and of a pipeline of stages."""

    def __init__(
        self,
        layout: Layout = Layout(),  # noqa: B008
        rank: int = 0,
        tensor: TensorParallel | None = None,
        everyone: ProcessGroup | None = None,
        links: StageLinks | None = None,
        activity: Activity | None = None,
    ) -> None:
        """
        Args:
            everyone: all ranks of the member; None: there is no other.
            links: to the stages beside this one; None: there are none.
        """
        self.layout = layout
        self.place = layout.place(rank)
        self.tensor = tensor or TensorParallel(Shard())
        self.activity = activity or Activity()
        self._everyone = everyone
        self._links = links
        self.mail: PeerMail | None = None  # see `use_mail`

    @property
    def stages(self) -> int:
        return self.layout.pp

    @property
    def is_first(self) -> bool:
        return self.place.stage == 0

    @property
    def is_last(self) -> bool:
        return self.place.stage == self.layout.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's results are the member's, and not rank 0's own."""
        place = self.place
        return self.stages > 1 and place.rank == self.layout.last_stage(place.member)

    @property
    def links(self) -> StageLinks:
        assert self._links is not None, "a member of one stage has no links"
        return self._links

    def use_mail(self, device: torch.device, rows: int, depth: int) -> bool:
        """Let samples of the last stage reach the stages before it over peer memory, from device to
        device, where that is possible; every rank calls it at the same point.

        Args:
            rows: most that a step samples. depth: steps in flight.
        """
        layout, place = self.layout, self.place
        if self._everyone is None or self.stages == 1 or layout.members_straddle:
            return False
        if distributed.get_backend(self._everyone) != "nccl":
            return False
        first = layout.place(layout.leader(place.member)).local_rank
        if not self.minimum(is_possible(range(first, first + layout.ranks_per_member))):
            return False
        before = [stage * layout.tp + place.shard for stage in range(self.stages - 1)]
        receivers = before if self.is_last else []
        self.mail = PeerMail(self._everyone, device, rows, depth, receivers)
        return True

    def least(self, value: int) -> tuple[int, int]:
        """The smallest of the ranks' values, on every rank, and the first stage that has it."""
        if self._everyone is None:
            return value, self.place.stage
        packed = value * self.stages + self.place.stage
        on_cuda = distributed.get_backend(self._everyone) == "nccl"
        agreed = torch.tensor([packed], dtype=torch.int64, device="cuda" if on_cuda else "cpu")
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN, group=self._everyone)
        return divmod(int(agreed.item()), self.stages)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank: for sizes all must agree on."""
        return self.least(value)[0]


def form(
    layout: Layout,
    place: Place,
    device: torch.device,
    store: Store,
    transport: Transport,
    own_address: str = "",
) -> Member:
    """The torch groups of a rank that has joined: NCCL on CUDA, Gloo on a CPU, or where GPUs are
    to talk through host memory.

    torch's world is the member: members have no collective in common, so that none waits for
    another. Every rank of it calls this: each subgroup is made by all, its ranks or not.

    Args:
        own_address: this rank's on the network of the group; "" on one machine.
    """
    with _talking_at(own_address):
        return _form(layout, place, device, store, transport)


def _form(
    layout: Layout, place: Place, device: torch.device, store: Store, transport: Transport
) -> Member:
    nccl = device.type == "cuda" and transport is not Transport.GLOO
    leader = layout.leader(place.member)
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=PrefixStore("collectives", store),
        rank=place.rank - leader,
        world_size=layout.ranks_per_member,
        timeout=timedelta(seconds=START_SECONDS),
        device_id=device if nccl else None,
    )
    activity = Activity()
    tensor = TensorParallel(Shard())
    for ranks in layout.shards(place.member):
        inside = [rank - leader for rank in ranks]
        group = distributed.new_group(inside) if layout.tp > 1 else None
        if place.rank in ranks:
            shard = Shard(place.shard, layout.tp)
            first = place.local_rank - place.shard
            devices = range(first, first + layout.tp)
            tensor = TensorParallel(shard, group, device, devices, activity)
    everyone = distributed.new_group(list(range(layout.ranks_per_member)))
    links = _stage_links(layout, place, device, activity, nccl) if layout.pp > 1 else None
    return Member(layout, place.rank, tensor, everyone, links, activity)


def _stage_links(
    layout: Layout, place: Place, device: torch.device, activity: Activity, nccl: bool
) -> StageLinks:
    """Each with a group of its own, so that no send waits for another neighbour's."""
    if nccl:  # torch warns that sends of one group wait for each other, as these are meant to
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    before = after = None
    for stage in range(1, layout.pp):
        for shard in range(layout.tp):
            sender, receiver = layout.rank(0, stage - 1, shard), layout.rank(0, stage, shard)
            group = distributed.new_group(
                [sender, receiver], pg_options=_urgent() if nccl else None
            )
            if (place.stage, place.shard) == (stage, shard):
                before = Link(sender, group)
            elif (place.stage, place.shard) == (stage - 1, shard):
                after = Link(receiver, group)
    direct = nccl or device.type == "cpu"
    return (DirectLinks if direct else HostLinks)(before, after, device, activity)


def _urgent() -> distributed.ProcessGroupNCCL.Options:
    """A send is short, and the stage after waits for it: it goes before the next step's kernels."""
    return distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def limit_collectives(seconds: float) -> None:
    """From now on a collective, or a receive, that takes longer fails, in every group."""
    if distributed.is_initialized():
        for group in list(distributed.distributed_c10d._world.pg_map):
            distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
        end_groups()


def open_store(
    layout: Layout, member: int, directory: Path, listener: socket.socket | None = None
) -> Store:
    """The leader's, through which torch's groups find their connections.

    Args:
        directory: of the worker, where ranks of one machine share a file.
        listener: on the network of the group; None on one machine.
    """
    if listener is None:
        return _file_store(layout, member, directory)
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        layout.ranks_per_member,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(layout: Layout, member: int, directory: Path, place: StorePlace) -> Store:
    """The other ranks' way to it."""
    if not place.address:
        return _file_store(layout, member, directory)
    ranks = layout.ranks_per_member
    return TCPStore(place.address, place.port, ranks, is_master=False, wait_for_workers=False)


def _file_store(layout: Layout, member: int, directory: Path) -> Store:
    return FileStore(str(directory / f"ranks-{member}"), layout.ranks_per_member)


@contextmanager
def _talking_at(address: str) -> Iterator[None]:
    """Let groups that torch forms talk over the interface that has this address, or over loopback
    on one machine, unless the environment says which one.

    They read the environment while they are formed. Afterwards it is as before: the process may be
    a user's own, and start others, which may see other interfaces.
    """
    if address:
        name = _interface_of(address)
        wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}
    else:
        wanted = {"GLOO_SOCKET_IFNAME": "lo"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return name
    return None
