"""Where a router listens."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from radixgrove.router.listening import StartError, listen


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
    with listen("::", 0, shared=False) as sock:
        assert reaches(address, sock)


def test_every_address_is_of_ipv4_on_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *rest: Any, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    with listen("::", 0, shared=False) as sock:
        assert sock.family == socket.AF_INET
        assert reaches("127.0.0.1", sock)


def test_one_address_is_that_alone() -> None:
    with listen("127.0.0.1", 0, shared=False) as sock:
        assert reaches("127.0.0.1", sock)
        assert not reaches("127.0.0.2", sock)


def test_processes_share_a_port_only_when_told_to() -> None:
    with listen("::", 0, shared=True) as first:
        port = first.getsockname()[1]
        with listen("::", port, shared=True) as second:
            assert second.getsockname()[1] == port
        first.listen()
        with pytest.raises(StartError, match=f"port {port}"):
            listen("::", port, shared=False)
