"""What may happen to a Redis, or to the way there, short of its death."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import redis


def full(client: redis.Redis) -> None:
    client.config_set("maxmemory", "1")


def without_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", "1")


def unable_to_save(client: redis.Redis) -> None:
    """Its directory is gone: the last snapshot failed."""
    directory = Path(client.config_get("dir")["dir"]) / "gone"
    directory.mkdir()
    client.config_set("dir", str(directory))
    client.config_set("save", "900 1")
    directory.rmdir()
    client.execute_command("BGSAVE")


def well(client: redis.Redis) -> None:
    """Takes writes again, whatever was wrong."""
    client.config_set("maxmemory", "0")
    client.config_set("min-replicas-to-write", "0")
    client.config_set("stop-writes-on-bgsave-error", "no")


REFUSALS: dict[str, Callable[[redis.Redis], None]] = {
    "OOM": full,
    "NOREPLICAS": without_replicas,
    "MISCONF": unable_to_save,
}


_GETTIMEOFDAY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  static volatile int64_t *shift;
  if (!shift) {
    real = (int (*)(struct timeval *, void *)) dlsym(RTLD_NEXT, "gettimeofday");
    shift = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_SHIFT"), O_RDONLY), 0);
  }
  int status = real(now, zone);
  now->tv_sec += *shift;
  return status;
}
"""


class RedisClock:
    """The wall clock of a Redis that is started with `environment`; needs a C compiler."""

    def __init__(self, directory: Path) -> None:
        library = directory / "clock.so"
        command = ["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-", "-ldl"]
        subprocess.run(command, input=_GETTIMEOFDAY.encode(), check=True)
        self._shift = directory / "shift"
        self._shift.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}

    def set_forward(self, seconds: int) -> None:
        """From the true time; back, where it is negative."""
        with self._shift.open("r+b") as shift:
            shift.write(struct.pack("<q", seconds))


class RedisRoute:
    """An address that leads to a Redis: elsewhere or slower from now on, as a test wants.

    As with a Service of Kubernetes, a new target is for new connections only.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0  # seconds that an answer takes longer
        self.connections = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Ends all connections; what was on its way to a client is lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers.add(writer)
        await asyncio.gather(
            self._pump(reader, far[1], lambda: 0.0), self._pump(far[0], writer, lambda: self.delay)
        )
        self._writers.discard(writer)

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: Callable[[], float]
    ) -> None:
        """Passes everything on, each part so much later: later parts do not wait for earlier."""
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await parts.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)

        delivering = asyncio.create_task(deliver())
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                parts.put_nowait((loop.time() + delay(), data))
        delivering.cancel()
        writer.close()


@contextlib.asynccontextmanager
async def route(target: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[RedisRoute]:
    found = RedisRoute(target)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(found.handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
