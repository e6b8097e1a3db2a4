"""The tests that a change touches, for `make check`: `python -m tools.touched [--since REF]`.

A source file's tests are those of the folder that mirrors its package, and others that import it
directly. What shows only between processes is left to `make test`.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# What is no module: the beginning of its path, and its tests.
_OTHERS = {
    "docs/": ["tests/docs"],
    "examples/": ["tests/docs"],
    "helm/": ["tests/chart"],
    "benchmarks/": ["tests/benchmarks", "tests/docs"],
    "README.md": ["tests/docs"],
    "Makefile": ["tests/docs"],
}


def changed_files(since: str, root: Path = ROOT) -> list[str]:
    """Paths that differ from the common ancestor with `since`, uncommitted and new ones too."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (base,) = git("merge-base", since, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", base), *new})


def select_tests(changed: Iterable[str]) -> list[str]:
    """Test files and folders to run, those that import what changed first; none twice."""
    direct: list[str] = []
    folders: list[str] = []
    for path in changed:
        module = module_of(path)
        if module is not None:
            direct += (test for test, used in _imports().items() if module in used)
            folders += _mirror(module)
        elif path.startswith("tests/"):
            own = PurePosixPath(path)
            if own.match("test_*.py"):
                direct.append(path)
            else:
                folders.append(str(own.parent))
        else:
            folders += next(
                (tests for start, tests in _OTHERS.items() if path.startswith(start)), []
            )
    wanted = dict.fromkeys(path for path in direct + folders if (ROOT / path).exists())
    return [path for path in wanted if not any(_inside(path, other) for other in wanted)]


def module_of(path: str) -> str | None:
    """The dotted name of a file of the product or of the tools; None for any other file."""
    parts = PurePosixPath(path).with_suffix("").parts
    if not path.endswith(".py"):
        return None
    if parts[1:2] == ("radixgrove",):
        return ".".join(parts[1:]).removesuffix(".__init__")
    return ".".join(parts) if parts[0] == "tools" else None


def _mirror(module: str) -> Iterator[str]:
    """The deepest folder of tests that has the name of the module or of a package around it."""
    parts = module.removeprefix("radixgrove.").split(".")
    for end in range(len(parts), 0, -1):
        folder = "/".join(["tests", *parts[:end]])
        if (ROOT / folder).is_dir():
            yield folder
            return


@cache
def _imports() -> dict[str, set[str]]:
    """Modules that each test file imports, itself or by a helper beside it."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if "cluster/" not in str(path)]
    own = {_relative(path): set(_imported(path)) for path in files}
    helpers = {path.removesuffix(".py").replace("/", "."): used for path, used in own.items()}
    return {
        path: used.union(*(helpers[name] for name in used if name in helpers))
        for path, used in own.items()
        if PurePosixPath(path).match("test_*.py")
    }


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _inside(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default="main", help="a branch or commit")
    print("\n".join(select_tests(changed_files(parser.parse_args().since))))


if __name__ == "__main__":
    main()
