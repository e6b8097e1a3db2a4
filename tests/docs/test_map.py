"""The map of the house at the beginning of docs/architecture.md names what is there, and leaves out
no module of size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "service", "kernels", "worker", "router", "operator", "cli")
LARGE = 80  # lines of a module that the map has to name
# Large modules that the map need not name: their folder's row says it for all of them.
ONE_OF_MANY = ("cli/commands", "protocol/model/families")

_TEXT = (ROOT / "docs/architecture.md").read_text()


class Row(NamedTuple):
    """A row of the tables of rooms: its folders, and the cell of files that matter."""

    rooms: list[Path]
    files: str


def _section(begin: str, end: str) -> str:
    return _TEXT[_TEXT.index(begin) : _TEXT.index(end)]


def _cells(table: str) -> list[list[str]]:
    """The rows of a table below its head, by cells."""
    rows = table.partition("|---")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def _place(path: str) -> Path:
    """`worker/x.py` is `worker/radixgrove/worker/x.py`; other paths are of the checkout."""
    package, _, rest = path.partition("/")
    return ROOT / package / "radixgrove" / package / rest if package in PACKAGES else ROOT / path


def _rows() -> Iterator[Row]:
    for package in ("protocol", "worker"):
        begin = f"### `{package}/`: top to bottom"
        for room, *_, files in _cells(_TEXT[_TEXT.index(begin) :]):
            names = re.findall(r"`(\w+)/`", room)
            yield Row([_place(f"{package}/{name}") for name in names] or [_place(package)], files)
    rest = "### `router/`, `operator/`, `service/`, `kernels/`, `cli/`"
    for room, files in _cells(_section(rest, "### Where to put your hand")):
        yield Row([_place(name) for name in re.findall(r"`([\w/]+)/`", room)], files)


def _named(row: Row) -> set[str]:
    return set(re.findall(r"`(\w+)`", row.files))


def test_every_room_and_file_of_a_package_exists() -> None:
    missing, seen = [], 0
    for row in _rows():
        missing += [str(room) for room in row.rooms if not room.is_dir()]
        for name in re.findall(r"`(\w+/?)`", re.sub(r"\([^)]*\)", "", row.files)):
            seen += 1
            if not any((p / f"{name}.py").exists() or (p / name).is_dir() for p in row.rooms):
                missing.append(f"{row.rooms}: {name}")
    assert seen > 200
    assert missing == []


def test_every_large_module_is_on_the_map() -> None:
    rows = list(_rows())
    unnamed = []
    for package in PACKAGES:
        for module in sorted(_place(package).rglob("*.py")):
            folder = module.parent.relative_to(ROOT / package / "radixgrove").as_posix()
            if folder in ONE_OF_MANY or len(module.read_text().splitlines()) <= LARGE:
                continue
            around = [(row, room) for row in rows for room in row.rooms if room in module.parents]
            nearest = max((len(room.parts) for _, room in around), default=0)
            own = [row for row, room in around if len(room.parts) == nearest]
            if not any(module.stem in _named(row) for row in own):
                unnamed.append(f"{folder}/{module.name}")
    assert unnamed == []


def _hand() -> list[str]:
    return [" ".join(row) for row in _cells(_section("### Where to put", "### From other"))]


def _paths(row: str) -> list[Path]:
    names = re.findall(r"`([\w./-]+)`", row) + re.findall(r"> ([\w./-]+)`", row)
    return [_place(name) for name in names if "/" in name and not name.startswith("/")]


def test_every_file_to_put_a_hand_on_exists() -> None:
    paths = [path for row in _hand() for path in _paths(row)]
    assert len(paths) > 60
    assert [str(path) for path in paths if not path.exists()] == []


def test_bare_names_of_files_are_of_a_folder_of_their_row() -> None:
    missing = []
    for row in _hand():
        folders = {path if path.is_dir() else path.parent for path in _paths(row)}
        for name in re.findall(r"`(\w+\.(?:py|lua))`", row):
            if not any((folder / name).exists() for folder in folders):
                missing.append(name)
    assert missing == []


def test_names_in_code_stand_in_a_file_of_their_row() -> None:
    """Classes, constants and private names that a row mentions are in a file that it names."""
    missing, seen = [], 0
    for row in _hand():
        paths = _paths(row)
        bare = re.findall(r"`(\w+\.(?:py|lua))`", row)
        folders = {path if path.is_dir() else path.parent for path in paths}
        files = {path for path in paths if path.is_file()}
        files |= {folder / name for folder in folders for name in bare if (folder / name).is_file()}
        text = "\n".join(path.read_text() for path in sorted(files))
        for name in re.findall(r"`(_\w+|[A-Z]\w+|make_\w+)`", row):
            seen += 1
            if not re.search(rf"\b{name}\b", text):
                missing.append(name)
    assert seen > 20
    assert missing == []
