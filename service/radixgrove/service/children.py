"""Child processes that never outlive their parent, and whose last words are kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from radixgrove.service.logs import TRACE_PREFIX, escape
from radixgrove.service.processes import die_with

_KEPT_LINES = 40
_CHUNK = 1 << 16
# A traceback's last line, a command's complaint, a log record.
# `time ERROR logger: `, as service/logs.py writes it: who quotes the line has a time of its own.
_LOG_PREFIX = re.compile(r"^\S+Z (ERROR|CRITICAL) +\S+: ")
_ERROR_SIGNS = ("Error", "error:", " ERROR ", '"level":"error"')

Sink = Callable[[str], None]  # takes a line, without its end


class _Output(NamedTuple):
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport


class Child:
    """One running process. `start` makes it; `stop` or its own end is the only way out.

    Standard output and error arrive line by line at `sink`; the last lines stay for a post-mortem.
    The child has a process group of its own, so that Ctrl-C reaches only the parent, which drains.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        output: _Output,
        sink: Sink,
    ) -> None:
        self.name = name
        self.process = process
        self.tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._sink = sink
        self._output = output
        self._pump = asyncio.create_task(self._pump_output(), name=f"output of {name}")
        self.exited = asyncio.create_task(self._wait(), name=f"end of {name}")

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environ: Mapping[str, str], sink: Sink
    ) -> Child:
        """Must run on the main thread: the kernel ties the child to the thread that forks it."""
        # A pipe of our own: asyncio tells the end of a process only when all who inherited the pipe
        # that it made have ended too.
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", buffering=0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(writing)
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), pipe
        )
        return cls(name, process, _Output(output, transport), sink)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that is already gone is no error."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def stop(self, patience: float) -> int:
        """Ask it to end, insist after `patience` seconds, and return its exit status."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.exited), patience)
        return await self.kill()

    async def kill(self) -> int:
        """End it at once, even when it is stopped or hangs in a system call that allows it."""
        self.signal(signal.SIGKILL)
        return await asyncio.shield(self.exited)

    def last_error(self) -> str | None:
        """The line that most likely says why it ended: the last error, else the last at all."""
        lines = [line.removeprefix(TRACE_PREFIX) for line in self.tail if line.strip()]
        for line in reversed(lines):
            if not line[0].isspace() and any(sign in line for sign in _ERROR_SIGNS):
                return _LOG_PREFIX.sub("", line.strip())
        return lines[-1].strip() if lines else None

    async def _wait(self) -> int:
        code = await self.process.wait()
        # Output of a grandchild that still holds the pipe must not keep us waiting.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, 1.0)
        self._output.transport.close()
        return code

    async def _pump_output(self) -> None:
        rest = b""
        while chunk := await self._output.reader.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _CHUNK:  # a line without end must not fill the memory
                lines.append(rest)
                rest = b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = escape(line.decode("utf-8", "replace"))
        self.tail.append(text)
        self._sink(text)


def describe_exit(code: int) -> str:
    """For people: `exited with code 3`, `was killed by SIGKILL (out of memory?)`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
