"""What every client of Redis goes by: addresses, errors, which server is fit, when to reconnect.

Router and worker share one asynchronous client (`redis_link`), which pipelines calls on one
connection. The operator and `doctor` call from threads, where an event loop would be in the way:
they use redis-py's client (`redis_client`) by the same rules.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import RedisError

from radixgrove.protocol.errors import PeerError

# The server was demoted, is loading its data or has lost its master: another one has the address
# by now, or this one will be well after a while.
RECONNECT = frozenset({"READONLY", "LOADING", "MASTERDOWN"})
# Of a node of a cluster, or of what stands before one and does not say so.
OF_A_CLUSTER = frozenset({"MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN", "TRYAGAIN"})
CLUSTER = (
    "Redis runs in cluster mode, which is not supported; use a single server, replicated if it "
    "must be highly available"
)
_DATABASE = re.compile(r"(/[0-9]{0,9}/?)?")
_OF_THE_POOL = ("max_connections", "timeout")  # parameters of a URL that are no connection's


class RedisUnavailable(PeerError):
    """Redis cannot be asked now."""


class RedisRefused(PeerError):
    """Redis answered with an error."""

    @property
    def code(self) -> str:
        """The error's first word: `OOM`, `READONLY`, `WRONGTYPE`, …"""
        return str(self).partition(" ")[0]


class RedisUnsuitable(RedisRefused):
    """This server is none to work with, however well it answers; the text says why."""


def check_server(info: Mapping[str, object]) -> None:
    """Refuses a server by what its INFO says of itself (sections `server` and `memory`).

    Raises:
        RedisUnsuitable: it may evict keys, or is one node of a Redis Cluster.
    """
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise RedisUnsuitable(
            f"Redis has maxmemory-policy {policy}; the prefix index needs noeviction"
        )
    if "cluster" in (info.get("redis_mode"), info.get("server_mode")):  # the latter: Valkey
        raise RedisUnsuitable(CLUSTER)


def parse_info(answer: bytes) -> dict[str, str]:
    """The fields of an INFO answer."""
    lines = answer.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


class RedisAddress:
    """Where a URL leads, read as redis-py reads it, TLS parameters included."""

    def __init__(self, url: str) -> None:
        """Raises ValueError, which does not repeat the URL: it may hold a password."""
        try:
            parts = urlsplit(url)
            # A `#` or `?` in a password ends the address, and a database that is none would be
            # number 0.
            cut = parts.fragment or "@" in parts.query
            if cut or (parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path)):
                raise ValueError
            options: dict[str, Any] = dict(parse_url(url))
            self._kind = options.pop("connection_class", Connection)
            for name in _OF_THE_POOL:
                options.pop(name, None)
            self._options = options
            connection = self._connection()
        except (ValueError, TypeError, RedisError):
            raise ValueError(
                "not like redis://[[user]:password@]host:port/db, with %23 for # in a password and "
                "such, or rediss://… with redis-py's parameters for TLS"
            ) from None
        self.path: str | None = None
        self.host, self.port = "", 0
        if isinstance(connection, UnixDomainSocketConnection):
            self.path = connection.path
        else:
            self.host, self.port = connection.host, int(connection.port)
        self.username: str | None = connection.username
        self.password: str | None = connection.password
        self.database = int(connection.db or 0)

    def _connection(self) -> Any:
        """An unconnected connection of redis-py's, for what it makes of the parameters."""
        return self._kind(**self._options)

    def tls(self) -> ssl.SSLContext | None:
        """A context made anew, as certificates on disk are renewed. Raises OSError."""
        connection = self._connection()
        return connection.ssl_context.get() if isinstance(connection, SSLConnection) else None
