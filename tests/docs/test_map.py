"""The map of the house at the beginning of docs/architecture.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "service", "kernels", "worker", "router", "operator", "cli")

_TEXT = (ROOT / "docs/architecture.md").read_text()


def _section(begin: str, end: str) -> str:
    return _TEXT[_TEXT.index(begin) : _TEXT.index(end)]


def _place(path: str) -> Path:
    """`worker/x.py` is `worker/radixgrove/worker/x.py`; other paths are of the checkout."""
    package, _, rest = path.partition("/")
    return ROOT / package / "radixgrove" / package / rest if package in PACKAGES else ROOT / path


def test_every_file_to_put_a_hand_on_exists() -> None:
    rows = _section("### Where to put your hand", "### From other programs").partition("|---")[2]
    paths = [name for name in re.findall(r"`([\w./]+)`", rows) if "/" in name]
    paths = [path for path in paths if "radixgrove/" not in path]
    assert len(paths) > 20
    assert [path for path in paths if not _place(path).exists()] == []


def test_every_room_and_file_of_a_package_exists() -> None:
    missing, seen = [], 0
    for package in ("protocol", "worker"):
        begin = f"### `{package}/`: top to bottom"
        table = _TEXT[_TEXT.index(begin) :].partition("|---")[2].partition("\n\n")[0]
        for row in table.splitlines()[1:]:
            room, *_, files = (cell.strip() for cell in row.strip("|").split("|"))
            rooms = [_place(f"{package}/{name}") for name in re.findall(r"`(\w+)/`", room)]
            missing += [str(room) for room in rooms if not room.is_dir()]
            for name in re.findall(r"`(\w+/?)`", re.sub(r"\([^)]*\)", "", files)):
                seen += 1
                places = rooms or [_place(package)]
                if not any((p / f"{name}.py").exists() or (p / name).is_dir() for p in places):
                    missing.append(f"{package}/{room}: {name}")
    assert seen > 60
    assert missing == []
