"""Sockets that servers listen on."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from radixgrove.service.listening import bound_socket


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


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_host_is_refused(address: str) -> None:
    with pytest.raises(OSError) as raised:  # noqa: PT011
        bound_socket(address, 0)
    assert raised.value.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
