"""Every benchmark can at least be imported, on a machine without a GPU too."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    importlib.import_module(name)
