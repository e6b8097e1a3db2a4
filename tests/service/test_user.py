"""Users that the system does not know: a container may run under any number."""

from __future__ import annotations

import getpass
import os
import stat
from pathlib import Path

import pytest

from radixgrove.service.user import know_user

NAMES = ("HOME", "TMPDIR", "LOGNAME", "USER", "LNAME", "USERNAME")
UNKNOWN = 1_002_700_000


@pytest.fixture
def unknown_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once pytest has made its directory, as the user that it is."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before once the test is over
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: UNKNOWN)


def home_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HOME in a new process with that temporary directory."""
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.delenv("HOME", raising=False)
    know_user()
    return Path.home()


@pytest.mark.usefixtures("unknown_user")
def test_an_unknown_user_has_a_name_and_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    home = home_in(tmp_path, monkeypatch)
    assert getpass.getuser() == f"uid-{UNKNOWN}"
    assert home == tmp_path / f"radixgrove-{UNKNOWN}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert home_in(tmp_path, monkeypatch) == home


@pytest.mark.usefixtures("unknown_user")
@pytest.mark.parametrize("planted", ["a link", "open", "a file", "another's"])
def test_a_home_that_others_may_have_filled_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    found = tmp_path / f"radixgrove-{UNKNOWN}"
    if planted == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        found.symlink_to(tmp_path / "elsewhere")
    elif planted == "a file":
        found.touch()
    else:
        found.mkdir()
        found.chmod(0o777 if planted == "open" else 0o700)
    if planted == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: UNKNOWN)
    home = home_in(tmp_path, monkeypatch)
    assert home.resolve().parent == tmp_path.resolve()
    assert home.resolve() not in (found.resolve(), tmp_path.resolve())
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.usefixtures("unknown_user")
def test_without_a_place_to_write_there_is_a_home_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_in(tmp_path / "absent", monkeypatch)
    assert home == tmp_path / "absent" / f"radixgrove-{UNKNOWN}"


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
