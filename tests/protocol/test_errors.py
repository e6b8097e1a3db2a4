"""Every exception that the product defines belongs to one tree, which its root draws."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest

from radixgrove.protocol.errors import RadixgroveError

PARTS = ("protocol", "service", "kernels", "worker", "router", "operator", "cli")


def exceptions_of(part: str) -> set[type[BaseException]]:
    package = importlib.import_module(f"radixgrove.{part}")
    found: set[type[BaseException]] = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and issubclass(value, BaseException):
                    found.add(value)
    return {one for one in found if one.__module__.startswith(f"{package.__name__}.")}


def drawn() -> dict[str, str]:
    """From the root's docstring: each exception's name, and its parent's."""
    parents: dict[str, str] = {}
    path = ["RadixgroveError"]
    for line in inspect.getdoc(RadixgroveError).splitlines():  # type: ignore[union-attr]
        if branch := re.match(r"((?:│   |    )*)[├└]── (\w+)", line):
            depth = len(branch[1]) // 4 + 1
            path[depth:] = [branch[2]]
            assert branch[2] not in parents, "once each"
            parents[branch[2]] = path[depth - 1]
    return parents


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_stands_in_the_tree_where_it_is_drawn(part: str) -> None:
    tree = drawn()
    for found in exceptions_of(part):
        assert issubclass(found, RadixgroveError), found
        if found is not RadixgroveError and not found.__name__.startswith("_"):
            assert tree.get(found.__name__) == found.__bases__[0].__name__, found


def test_no_branch_is_of_a_class_that_is_gone() -> None:
    names = {found.__name__ for part in PARTS for found in exceptions_of(part)}
    assert set(drawn()) <= names
