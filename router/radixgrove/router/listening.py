"""The sockets on which a router listens."""

from __future__ import annotations

import socket

from radixgrove.service.listening import bound_socket


class StartError(Exception):
    """The router cannot start; the text says what to change."""


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """See `bound_socket`.

    Raises:
        StartError: the port is taken or the address not ours.
    """
    try:
        return bound_socket(host, port, shared=shared)
    except OSError as error:
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
