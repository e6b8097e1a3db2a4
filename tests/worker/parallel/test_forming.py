"""torch's groups are formed over the interface that the environment names, or the group's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from radixgrove.protocol.settings import Transport
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.member import Member, form, leave, open_store

CPU = torch.device("cpu")
OWN_ADDRESSES = ["", "127.0.0.1"]  # of ranks on one machine, and on several


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    leave()
    # One that could not be formed counts, too, in the names that all ranks must give the next ones.
    distributed.distributed_c10d._world.group_count = 0


def form_one(directory: Path, own_address: str) -> Member:
    """A member of one rank."""
    layout = Layout()
    store = open_store(layout, 0, directory)
    return form(layout, layout.place(0), CPU, store, Transport.AUTO, own_address)


@pytest.mark.parametrize("own_address", OWN_ADDRESSES)
def test_the_environment_is_as_before(
    own_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{backend}_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    assert form_one(tmp_path, own_address).minimum(7) == 7
    assert dict(os.environ) == before


@pytest.mark.parametrize("own_address", OWN_ADDRESSES)
def test_an_interface_that_is_set_is_taken(
    own_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")
    with pytest.raises(RuntimeError, match="missing0"):
        form_one(tmp_path, own_address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "missing0"
