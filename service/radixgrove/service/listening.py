"""Sockets that servers listen on."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket with an address of its own, on which nobody listens yet.

    `::` is every address, of IPv4 too, and of IPv4 alone on a host without IPv6.

    Args:
        port: 0: any free one.
        shared: other sockets that are shared may have the same address.

    Raises:
        OSError: the port is taken or the address not ours.
    """
    if host == "::" and not _has_ipv6():
        host = "0.0.0.0"
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
