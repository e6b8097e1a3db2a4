"""Log lines: one a record, forged by no text, and never waited for."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from radixgrove.protocol.settings import LogLevel
from radixgrove.service.logs import (
    JsonFormatter,
    LevelFile,
    LineWriter,
    TextFormatter,
    escape,
)
from tests.conftest import wait_until

FORGED = "2026-01-01T00:00:00.000Z ERROR root: forged"
HOSTILE = ["\n", "\r", "\r\n", "\x0b", "\x1b[2J", "\x7f", "\x85", "\x9b", "\u2028", "\u202e", "\0"]


def record(message: str, error: Exception | None = None) -> logging.LogRecord:
    trace = None if error is None else (type(error), error, error.__traceback__)
    return logging.getLogger("test").makeRecord(
        "test", logging.INFO, "", 0, "said %s", (message,), trace
    )


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_control_characters_of_a_message_are_escaped(
    formatter: logging.Formatter, hostile: str
) -> None:
    spoken = record(f"before{hostile}{FORGED}")
    spoken.fields = {"path": f"/v1/x{hostile}{FORGED}"}
    line = formatter.format(spoken)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028-\u202e]", line)
    assert line.count(FORGED) == 2
    assert not line.startswith("2026-01-01T00")


def test_json_gives_back_what_was_said() -> None:
    text = "".join(HOSTILE)
    assert json.loads(JsonFormatter().format(record(text)))["message"] == f"said {text}"


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Grüße, 世界 🙂 \\n"
    assert escape(text) == text


def test_the_text_of_an_exception_cannot_pass_for_a_record() -> None:
    try:
        raise ValueError(f"first\n{FORGED}\r\x1b[2J")
    except ValueError as error:
        lines = TextFormatter().format(record("oops", error)).split("\n")
    assert "Traceback" in lines[1]
    assert all(line.startswith("| ") for line in lines[1:])
    assert f"| {FORGED}\\r\\x1b[2J" in lines


def test_lines_wait_while_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reading, writing = os.pipe()
    writer = LineWriter(writing)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        writer.write("first")
    writer.write("second")
    try:
        assert writer.flush(30)
        assert os.read(reading, 100) == b"first\nsecond\n"
    finally:
        os.close(reading)
        os.close(writing)


def test_lines_beyond_the_bound_are_dropped_counted_and_reported_once() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, limit=100_000)
    counted: list[int] = []
    writer.on_drop = counted.append
    try:
        for number in range(5000):
            writer.write(f"{number:06d} " + "x" * 92)
        assert writer.dropped > 0
        lines: list[str] = []

        def read() -> None:
            with os.fdopen(reading, closefd=False) as file:
                lines.extend(file)

        reader = threading.Thread(target=read)
        reader.start()
        assert writer.flush(30)
        writer.write("afterwards")
        assert writer.flush(30)
        os.close(writing)
        reader.join(30)
    finally:
        os.close(reading)
    dropped = sum(counted)
    assert dropped == writer.dropped
    assert lines.count(f"{dropped} log lines were dropped\n") == 1
    assert len(lines) == 5000 - dropped + 2  # the report and what came afterwards
    numbers = [int(line[:6]) for line in lines if line[:6].isdecimal()]
    assert len(numbers) == 5000 - dropped
    assert numbers == sorted(set(numbers))


UNREAD = """
import logging
from radixgrove.service import logs
logs.configure("info", json=False)
for number in range(30_000):
    logging.info("line %d %s", number, "x" * 80)
print("done", flush=True)
input()
"""


def test_a_process_goes_on_although_nothing_reads_its_standard_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    _, said = process.communicate("\n", timeout=60)
    (report,) = re.findall(r"(\d+) log lines were dropped: standard error was not read", said)
    assert said.count(" INFO    root: line ") == 30_000 - int(report)
    assert process.returncode == 0


def test_a_process_ends_although_nothing_reads_its_standard_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.wait(60) == 1  # `input` found the end of its file
    process.communicate()


def test_last_lines_are_written_before_the_end() -> None:
    code = (
        "import logging; from radixgrove.service import logs; logs.configure('info', json=False)\n"
        "for number in range(1000): logging.info('line %d', number)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stderr.splitlines()[-1].endswith("line 999")
    assert len(process.stderr.splitlines()) == 1000


def test_a_level_that_is_written_is_followed(tmp_path: Path) -> None:
    code = (
        "import logging, sys, pathlib, time\n"
        "from radixgrove.service import logs\n"
        "logs.LevelFile(pathlib.Path(sys.argv[1])).follow()\n"
        "while logging.getLogger().level != logging.ERROR: time.sleep(0.05)\n"
    )
    follower = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    before = logging.getLogger().level
    try:
        LevelFile(tmp_path).write(LogLevel.ERROR)
        assert logging.getLogger().level == logging.ERROR
        wait_until(lambda: follower.poll() is not None, what="the follower's new level")
        assert follower.returncode == 0
    finally:
        logging.getLogger().setLevel(before)
        follower.kill()
        follower.wait()
