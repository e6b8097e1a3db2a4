"""Sockets that servers listen on."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from radixgrove.protocol.settings import RouterSettings, WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.service.listening import (
    BindingError,
    bound_socket,
    listen,
    listen_for_management,
    reserve,
)


def reaches(address: str, sock: socket.socket) -> bool:
    sock.listen()
    try:
        with socket.create_connection((address, sock.getsockname()[1]), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_every_address_is_of_both_families(address: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with bound_socket("::", 0) as sock:
        assert reaches(address, sock)


def test_every_address_is_of_ipv4_on_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *rest: Any, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    with bound_socket("::", 0) as sock:
        assert sock.family == socket.AF_INET
        assert reaches("127.0.0.1", sock)


def test_one_address_is_that_alone() -> None:
    with bound_socket("127.0.0.1", 0) as sock:
        assert reaches("127.0.0.1", sock)
        assert not reaches("127.0.0.2", sock)


def test_a_port_is_shared_only_by_those_who_mean_to() -> None:
    with bound_socket("::", 0, shared=True) as first:
        port = first.getsockname()[1]
        with bound_socket("::", port, shared=True) as second:
            assert second.getsockname()[1] == port
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("::", port)


def test_a_port_is_not_reserved_where_strangers_share_it() -> None:
    with reserve("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound_socket("127.0.0.1", port, shared=True) as serving:
            serving.listen()
            with pytest.raises(BindingError, match=f"port {port}: Address already in use"):
                reserve("127.0.0.1", port)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_host_is_refused(address: str) -> None:
    with pytest.raises(OSError) as raised:  # noqa: PT011
        bound_socket(address, 0)
    assert raised.value.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@pytest.mark.parametrize("address", ["300.1.1.1", "192.0.2.1", "2001:db8::1"])
def test_an_address_that_is_none_of_the_machines_is_what_is_to_be_changed(address: str) -> None:
    with pytest.raises(BindingError, match=r"choose an address of this machine with --host$"):
        listen(address, 8000)
    settings = RouterSettings(management_host=address, management_key="m")
    with pytest.raises(BindingError, match=r"management port 8001: .* with --management-host$"):
        listen_for_management(settings)


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(
            BindingError, match=f"127.0.0.1 port {port}: Address already in use; .* --port"
        ):
            listen("127.0.0.1", port, shared=True)


@pytest.mark.parametrize("kind", [WorkerSettings, RouterSettings])
def test_management_leaves_the_machine_only_with_a_key(
    kind: type[WorkerSettings | RouterSettings],
) -> None:
    open_to_all = kind(management_host="0.0.0.0", management_port=0)
    open_without_key = r"0\.0\.0\.0 is not loopback: set management_key"
    with pytest.raises(BindingError, match=open_without_key) as refused:
        listen_for_management(open_to_all)
    assert exit_codes.of(refused.value) == exit_codes.USAGE
    for settings in (
        kind(management_host="127.0.0.1", management_port=0),
        kind(management_host="0.0.0.0", management_port=0, management_key="m"),
    ):
        with listen_for_management(settings) as sock:
            assert sock.getsockname()[0] == settings.management_host
