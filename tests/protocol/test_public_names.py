"""What packages export: each name is there, has its type, and costs nothing before its use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

PACKAGES = [f"radixgrove.{part}" for part in ("protocol", "service", "router", "worker")]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_what_a_type_checker_takes_it_for(package: str) -> None:
    found = importlib.import_module(package)
    (for_checkers,) = (
        node for node in ast.parse(inspect.getsource(found)).body if isinstance(node, ast.If)
    )
    declared = {
        alias.name: node.module
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(declared) == set(found.__all__)
    for name, module in declared.items():
        assert getattr(found, name) is getattr(importlib.import_module(str(module)), name), name
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        found.Absent  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_alone_imports_none_of_its_modules(package: str) -> None:
    script = f"import sys, {package}; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert not {"torch", "pydantic", "starlette", "aiohttp"} & set(loaded)
    ours = {name for name in loaded if name.startswith("radixgrove.")}
    assert ours <= {package, "radixgrove.protocol", "radixgrove.protocol.lazy"}


def test_the_protocol_needs_no_torch() -> None:
    script = "import sys; from radixgrove.protocol import *; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
