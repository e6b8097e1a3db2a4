"""Child processes that never outlive their parent; the end of what they print is kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

from radixgrove.service.liveness import TICK_VARIABLE, WatchClock
from radixgrove.service.logs import TRACE_PREFIX, escape, read_record
from radixgrove.service.processes import die_with

_KEPT_LINES = 40
_CHUNK = 1 << 16
_ERRORS = frozenset({"ERROR", "CRITICAL"})
# A traceback's last line, a command's complaint, a log record of another program.
_ERROR_SIGNS = ("Error", "error:", " ERROR ")

Sink = Callable[[str], None]  # takes a line, without its end


class _Output:
    """The child's standard output and error, line by line."""

    def __init__(self, sink: Sink) -> None:
        self.tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._sink = sink
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None

    async def connect(self, pipe: IO[bytes]) -> None:
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), pipe
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def pump(self) -> None:
        rest = b""
        while chunk := await self._reader.read(_CHUNK):
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


class _Ticks:
    """The reading end of the pipe by which the child shows that its event loop turns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._clock = WatchClock()
        self._last: float | None = None
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def silence(self) -> float | None:
        now = self._clock.now()
        return None if self._last is None else now - self._last

    def _read(self) -> None:
        if os.read(self._descriptor, _CHUNK):
            self._last = self._clock.now()
        else:  # all who could write have ended
            asyncio.get_running_loop().remove_reader(self._descriptor)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


class Child:
    """One running process. `start` makes it; `stop` or its own end is the only way out.

    Standard output and error arrive line by line at a sink; the last lines stay for a post-mortem.
    The child has a process group of its own, so that Ctrl-C reaches only the parent, which drains.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, output: _Output | None, ticks: _Ticks
    ) -> None:
        self.name = name
        self.process = process
        self._output = output
        self._ticks = ticks
        self._pump = asyncio.create_task(_pump(output), name=f"output of {name}")
        self.exited = asyncio.create_task(self._wait(), name=f"end of {name}")

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environ: Mapping[str, str], sink: Sink | None
    ) -> Child:
        """Must run on the main thread: the kernel ties the child to the thread that forks it.

        Args:
            sink: None: the child writes where this process does.
        """
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as at_once:
            ticking, tick = os.pipe()
            on_failure.callback(os.close, ticking)
            at_once.callback(os.close, tick)
            output, writing, pipe = None, None, None
            if sink is not None:
                # A pipe of our own: asyncio tells the end of a process only when all who inherited
                # the pipe that it made have ended too.
                reading, writing = os.pipe()
                at_once.callback(os.close, writing)
                pipe = on_failure.enter_context(os.fdopen(reading, "rb", buffering=0))
                output = _Output(sink)
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**environ, TICK_VARIABLE: str(tick)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=None if writing is None else asyncio.subprocess.STDOUT,
                process_group=0,
                pass_fds=(tick,),
                preexec_fn=die_with(os.getpid()),
            )
            on_failure.pop_all()
        if output is not None and pipe is not None:
            await output.connect(pipe)
        return cls(name, process, output, _Ticks(ticking))

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

    def silence(self) -> float | None:
        """Seconds since its event loop last turned; None before it did, or when it does not tell.

        To be asked at least once a second (see `WatchClock`).
        """
        return self._ticks.silence()

    def last_error(self) -> str | None:
        """The line that most likely says why it ended: its last error, else its last line that is
        no log record, such as one of a request."""
        return self._last(_ERRORS)

    def last_complaint(self) -> str | None:
        """The line that most likely says what it waits for: as `last_error`, or a warning."""
        return self._last(_ERRORS | {"WARNING"})

    def _last(self, levels: Collection[str]) -> str | None:
        """Without the time of a record: messages that quote it have their own."""
        tail = self._output.tail if self._output is not None else ()
        other = None
        for line in reversed(tail):
            level, message = read_record(line)
            if level in levels:
                return message
            text = line.removeprefix(TRACE_PREFIX)
            if level or not text.strip():
                continue
            if not text[0].isspace() and any(sign in text for sign in _ERROR_SIGNS):
                return text.strip()
            other = other or text.strip()
        return other

    def obituary(self) -> str:
        """Of a child that ended: its name, how, and its last error where it left one."""
        code = self.process.returncode or 0
        text = f"{self.name} (process {self.pid}) {describe_exit(code)}"
        error = self.last_error()
        return f"{text}: {error}" if error and code != 0 else text

    async def _wait(self) -> int:
        code = await self.process.wait()
        # Output of a grandchild that still holds the pipe must not keep us waiting.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, 1.0)
        if self._output is not None:
            self._output.close()
        self._ticks.close()
        return code


async def _pump(output: _Output | None) -> None:
    if output is not None:
        await output.pump()


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
