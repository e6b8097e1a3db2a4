"""The sockets on which a router listens."""

from __future__ import annotations

import socket


class StartError(Exception):
    """The router cannot start; the text says what to change."""


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket; `shared` lets other processes listen on the same port.

    `::` is every address, of IPv4 too, and of IPv4 alone on a host without IPv6.

    Raises:
        StartError: the port is taken or the address not ours.
    """
    if host == "::" and not _has_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if host == "::":
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
