"""Processes of tests that begin as forks of one which has done their imports.

Each of them collects all tests, and most of collecting is imports: of torch, of transformers, of
clients. One process does them for all. pytest-xdist starts `forked_python.py` instead of python,
which hands its program and its standard streams to a fork of that process.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

# pytest rewrites assertions in our own; Go starts threads, which a fork would lack.
_LEFT_OUT = ("tests", "benchmarks", "tools", "__future__", "helm_python")
# What tests with transformers import of it later, and half as long as all else at their tops.
_TRANSFORMERS = "from transformers import LlamaForCausalLM"
_LONGEST = 1 << 16  # bytes of a program


class Preloaded:
    """A process that has imported what test files at or below some paths import at their top.

    Attributes:
        python: the command line that is used like python's.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rg-")
        address = f"{self._directory.name}/socket"
        relay = Path(__file__).with_name("forked_python.py")
        self.python = shlex.join([sys.executable, "-IS", str(relay), address])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                text=True,
            )
        assert self._process.stdin is not None
        statements = list(dict.fromkeys(imports_below(paths)))
        if any("transformers" in statement for statement in statements):
            statements.append(_TRANSFORMERS)
        self._process.stdin.write(json.dumps(statements) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it; its forks have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._directory.cleanup()


def files_below(paths: Iterable[Path]) -> Iterator[Path]:
    """Test files at or below some paths, and their `conftest.py`."""
    for path in paths:
        for file in path.rglob("*.py") if path.is_dir() else [path, path.parent / "conftest.py"]:
            if file.name.startswith(("test_", "conftest")) and file.exists():
                yield file


def imports_below(paths: Iterable[Path]) -> Iterator[str]:
    """Statements that import packages, at the top of those files."""
    for file in files_below(paths):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and _is_loaded(node):
                yield ast.unparse(node)


def _is_loaded(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return node.names[0].name.partition(".")[0] not in _LEFT_OUT
    return not node.level and (node.module or "").partition(".")[0] not in _LEFT_OUT


def serve(listener: socket.socket) -> str:
    """Returns in each fork, with the program that it is to run; ends with standard input."""
    for statement in json.loads(sys.stdin.readline()):
        with contextlib.suppress(Exception):  # the file that has it will fail
            exec(statement, {})  # noqa: S102 - a line of a test file
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack the other threads"
    gc.freeze()
    forks = []
    while _is_asked(listener):
        link, _ = listener.accept()
        program, streams, _, _ = socket.recv_fds(link, _LONGEST, 3)
        forks.append(os.fork())
        if forks[-1] == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            listener.close()
            link.detach()  # closed by the end of the process
            return program.decode()
        for stream in streams:
            os.close(stream)
        link.close()
    for fork in forks:
        os.kill(fork, signal.SIGKILL)  # one that hangs: the others have ended
        os.waitpid(fork, 0)
    sys.exit()


def _is_asked(listener: socket.socket) -> bool:
    """Whether a fork is asked for; False: it is time to end."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        return all(key.fileobj is listener for key, _ in selector.select())


if __name__ == "__main__":
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    # As under `python -c`.
    sys.argv = ["-c"]
    sys.stdin = os.fdopen(0, closefd=False)
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(program, vars(sys.modules["__main__"]))  # noqa: S102 - of pytest-xdist
