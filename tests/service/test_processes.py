"""What a process gets from whatever starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_OPENS_A_FILE = """
import os, sys
from radixgrove.service.processes import take_descriptors
take_descriptors()
for stream in (sys.stdout, sys.stderr):
    stream.flush()
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(2, b"a log line")
os.write(descriptor, str(descriptor).encode())
"""


def test_nothing_gets_the_number_of_a_standard_stream_that_was_closed(tmp_path: Path) -> None:
    file = tmp_path / "opened"
    program = [sys.executable, "-c", _OPENS_A_FILE, str(file)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program]
    subprocess.run(closed, check=True, timeout=60)
    assert int(file.read_text()) > 2


_ENDS = """
import asyncio
from radixgrove.service.processes import on_end

async def main():
    end = asyncio.Event()
    on_end(end.set)
    print("up", flush=True)
    await end.wait()
    print("ended in order", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_ends_a_process_ends_it_in_order(number: signal.Signals) -> None:
    # The tests themselves may have been started to outlive their terminal.
    command = ["env", "--default-signal=HUP", sys.executable, "-c", _ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "up\n"
        it.send_signal(number)
        assert it.communicate(timeout=60)[0] == "ended in order\n"
    assert it.returncode == 0


def test_what_was_started_to_outlive_its_terminal_does() -> None:
    command = ["nohup", sys.executable, "-c", _ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "up\n"
        status = Path(f"/proc/{it.pid}/status").read_text()
        it.terminate()
        it.communicate(timeout=60)
    ignored = re.search(r"SigIgn:\s+([0-9a-f]+)", status)
    assert ignored is not None
    assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1


_FREES_LARGE_BLOCKS = """
import re, sys
from pathlib import Path
from radixgrove.service.processes import give_large_blocks_back

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

give_large_blocks_back()
bytearray(8 << 20)  # from here on the C library keeps blocks of this size, if it may
before, kept = resident(), []
for _ in range(8):
    large = [bytes(8 << 20) for _ in range(2)]
    kept.append(bytearray(100_000))  # behind them
    del large
print(resident() - before)
"""


def test_what_large_bodies_took_is_given_back() -> None:
    program = [sys.executable, "-c", _FREES_LARGE_BLOCKS]
    done = subprocess.run(program, check=True, timeout=60, capture_output=True, text=True)
    assert int(done.stdout) < 4 << 20
