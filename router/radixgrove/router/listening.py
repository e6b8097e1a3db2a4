"""The sockets on which a router listens."""

from __future__ import annotations

import socket


class StartError(Exception):
    """The router cannot start; the text says what to change."""


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket; `shared` lets other processes listen on the same port.

    Raises:
        StartError: the port is taken or the address not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock
