"""Users that the system does not know: a container may run under any number."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from radixgrove.service.user import know_user

NAMES = ("HOME", "TMPDIR", "LOGNAME", "USER", "LNAME", "USERNAME")
UNKNOWN = 1_002_700_000


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before once the test is over
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: UNKNOWN)


@pytest.mark.usefixtures("unknown_user")
def test_an_unknown_user_has_a_name_and_a_home() -> None:
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    know_user()
    assert getpass.getuser() == f"uid-{UNKNOWN}"
    assert Path.home() == Path("/tmp")


@pytest.mark.usefixtures("unknown_user")
def test_what_is_said_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/cache")
    monkeypatch.setenv("USER", "somebody")
    know_user()
    assert (getpass.getuser(), Path.home()) == ("somebody", Path("/cache"))


def test_a_known_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    know_user()
    assert "HOME" not in os.environ
    assert "USER" not in os.environ
