"""Sockets that servers listen on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import NamedTuple

from radixgrove.protocol.settings import RouterSettings, WorkerSettings
from radixgrove.service import exit_codes

# Of an address that is none of this machine's, whatever the port.
_OF_THE_HOST = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


class BindingError(exit_codes.CodedStartFailed):
    """A port cannot be opened as configured; the text says what to change."""


class Listener(NamedTuple):
    """What a port is for, and the flags of its address."""

    name: str
    host_flag: str
    port_flag: str

    def explain(
        self, error: OSError, host: str, port: int, another: str = " (0: any free one)"
    ) -> str:
        """What is wrong with an address, and which of its flags to change.

        Args:
            another: says which port would do.
        """
        text = f"cannot listen on {host} {self.name} {port}: {error.strerror}; choose "
        if is_of_the_host(error):
            return f"{text}an address of this machine with {self.host_flag}"
        return f"{text}another with {self.port_flag}{another}"


def is_of_the_host(error: OSError) -> bool:
    """Whether the address is none of this machine's, so that no port of it would do."""
    return isinstance(error, socket.gaierror) or error.errno in _OF_THE_HOST


def code_of(error: OSError) -> int:
    """The exit code of what cannot listen."""
    return exit_codes.USAGE if is_of_the_host(error) else exit_codes.FAILED


API = Listener("port", "--host", "--port")
MANAGEMENT = Listener("management port", "--management-host", "--management-port")


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket for a server; see `bound_socket`.

    Raises:
        BindingError: the port is taken or the address not ours.
    """
    return _bind(API, host, port, shared=shared)


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that holds the port for processes that share it, and never listens.

    The kernel hands it no connection. A first bind that shares nothing finds strangers on the port,
    which a shared one would silently join.

    Raises:
        BindingError: the port is taken or the address not ours.
    """
    if port:
        listen(host, port).close()
    return listen(host, port, shared=True)


def listen_for_management(settings: WorkerSettings | RouterSettings) -> socket.socket:
    """A bound socket for the management port.

    Raises:
        BindingError: see `check_management`; or the port is taken or the address not ours.
    """
    check_management(settings)
    return _bind(MANAGEMENT, settings.management_host, settings.management_port)


def check_management(settings: WorkerSettings | RouterSettings) -> None:
    """The management port has a key, or is this machine's alone.

    Raises:
        BindingError: it would be reachable from elsewhere without a key.
    """
    if settings.management_key is None and not is_loopback(settings.management_host):
        raise BindingError(
            f"management_host {settings.management_host} is not loopback: set management_key "
            "(RADIXGROVE_MANAGEMENT_KEY), or listen on 127.0.0.1",
            exit_codes.USAGE,
        )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket with an address of its own, which does not listen yet.

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


def _bind(listener: Listener, host: str, port: int, *, shared: bool = False) -> socket.socket:
    try:
        return bound_socket(host, port, shared=shared)
    except OSError as error:
        raise BindingError(listener.explain(error, host, port), code_of(error)) from error


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
