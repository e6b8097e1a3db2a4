"""Lines of the log, whatever stands in them."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from radixgrove.service.logs import JsonFormatter, TextFormatter

FORGED = "x\n2026-01-01T00:00:00.000Z ERROR root: forged\r\x1b[2J\x9b2J\u2028\u202e"


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("test", logging.INFO, "file", 1, message, (), None)
    made.fields = fields
    return made


def test_what_a_client_sent_begins_no_line_and_steers_no_terminal() -> None:
    line = TextFormatter().format(record(FORGED, path=FORGED))
    assert line.isprintable()
    assert line.count(r"x\n2026-01-01T00:00:00.000Z ERROR root: forged\r\x1b[2J") == 2


def test_texts_of_all_languages_stay_as_they_are() -> None:
    assert TextFormatter().format(record("Grüße, 世界 ✓")).endswith("test: Grüße, 世界 ✓")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_an_exceptions_text_begins_no_line_either(formatter: logging.Formatter) -> None:
    made = record("failed")
    try:
        raise ValueError(FORGED)
    except ValueError:
        made.exc_info = sys.exc_info()
    lines = formatter.format(made).splitlines()
    assert not [line for line in lines if line.startswith("2026-01-01")]
    assert "\x1b" not in "".join(lines)


def test_json_lines_are_one_object_each() -> None:
    line = JsonFormatter().format(record(FORGED, path=FORGED))
    assert "\n" not in line
    assert json.loads(line)["path"] == FORGED
