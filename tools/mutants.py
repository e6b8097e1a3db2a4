"""What the tests catch: `python -m tools.mutants draw FILE`, then `… run FILE`.

`draw` writes small faults (a comparison turned round, a call left out, …) of five parts of the
product to FILE; the seed decides which. `run` puts each into a copy of the checkout, runs the tests
that touch it there until one fails, and says which faults none of them noticed. A fault is found
again by its function and its text, so that a list made of one commit serves for another.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tools.touched import ROOT, select_tests

AREAS = {
    "scheduler": ["worker/radixgrove/worker/scheduler/*.py"],
    "tree": ["worker/radixgrove/worker/cache/*.py"],
    "placement": ["router/radixgrove/router/placement.py", "router/radixgrove/router/replicas.py"],
    "proxy": ["router/radixgrove/router/proxy.py", "router/radixgrove/router/upstream.py"],
    "operator": [
        "operator/radixgrove/operator/planning/*.py",
        "operator/radixgrove/operator/controller/reconciler.py",
    ],
}
# A test that hangs is a fault that is noticed, only later.
_TEST_SECONDS = 60
_EXIT_PASSED, _EXIT_FAILED, _EXIT_BROKEN = 0, 1, 2

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*",
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What only people read.
_SAID = ("logger.", "logging.", "warnings.")


@dataclass(frozen=True)
class Mutant:
    """`before`, which stands in `function` of `file` for the `occurrence`th time, as `after`."""

    area: str
    file: str
    function: str
    line: int
    before: str
    after: str
    occurrence: int

    def __str__(self) -> str:
        def short(text: str) -> str:
            return " ".join(text.split())[:60]

        place = f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"
        return f"{self.area}: {place}: {short(self.before)} → {short(self.after)}"

    def apply(self, source: str) -> str | None:
        """The faulty source; None where the function or its text is gone."""
        for name, node in _functions(ast.parse(source)):
            if name == self.function:
                begin, end = _span(source, node)
                pieces = source[begin:end].split(self.before)
                if len(pieces) - 1 <= self.occurrence:
                    return None
                head = self.before.join(pieces[: self.occurrence + 1])
                tail = self.before.join(pieces[self.occurrence + 1 :])
                return source[:begin] + head + self.after + tail + source[end:]
        return None


def mutants_of(area: str, file: str, source: str) -> Iterator[Mutant]:
    """Every single fault that this knows how to make in a file."""
    for function, node in _functions(ast.parse(source)):
        begin, end = _span(source, node)
        body = source[begin:end]
        for part in _parts(node):
            for what, after in _faults(source, part):
                start, stop = _span(source, what)
                before = source[start:stop]
                occurrence = body.count(before, 0, start - begin)
                head = before.join(body.split(before)[: occurrence + 1])
                if len(head) == start - begin:  # not so where occurrences overlap
                    line = source.count("\n", 0, start) + 1
                    yield Mutant(area, file, function, line, before, after, occurrence)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods by their qualified name; nested ones belong to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _parts(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of the body that do something: no annotations, no logging, no texts of errors."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        if isinstance(node, ast.Expr) and (
            isinstance(node.value, ast.Constant) or ast.unparse(node).startswith(_SAID)
        ):
            continue
        yield node
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        pending += (child for child in ast.iter_child_nodes(node) if child is not skipped)


def _faults(source: str, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    def text(part: ast.AST) -> str:
        begin, end = _span(source, part)
        return source[begin:end]

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield node, f"{text(left)} {_COMPARISONS[type(operator)]} {text(right)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            yield node, f"{text(left)} {_OPERATORS[type(operator)]} {text(right)}"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield node, word.join(f"({text(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"bool({text(operand)})"
        case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES:
            yield called, _NAMES[name]
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, f"not ({text(test)})"
        case ast.Expr() | ast.AugAssign():
            yield node, "pass"
        case ast.Continue():
            yield node, "break"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"


def _span(source: str, node: ast.AST) -> tuple[int, int]:
    """Where the node stands, in characters."""
    lines, starts = _lines(source)

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return (
        offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
        offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
    )


@cache
def _lines(source: str) -> tuple[list[str], list[int]]:
    """The lines of a file, and where each begins."""
    lines = source.splitlines(keepends=True)
    return lines, [0, *itertools.accumulate(map(len, lines))]


def draw(seed: int, count: int) -> list[Mutant]:
    """As many of each area, by chance but the same for one seed and one source."""
    drawn: list[Mutant] = []
    for number, (area, patterns) in enumerate(AREAS.items()):
        files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
        candidates = [
            mutant
            for path in files
            for mutant in mutants_of(area, path.relative_to(ROOT).as_posix(), path.read_text())
        ]
        share = count // len(AREAS) + (number < count % len(AREAS))
        drawn += random.Random(f"{seed} {area}").sample(candidates, share)
    return drawn


class Copy:
    """A copy of the checkout's files with an environment of its own; a context manager."""

    def __enter__(self) -> Copy:
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        environment = {key: value for key, value in os.environ.items() if key != "VENV"}
        subprocess.run(
            [str(self.root / ".ci/setup"), "dev"], env=environment, check=True, stdout=sys.stderr
        )
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root)

    def verdict(self, mutant: Mutant, processes: str) -> str:
        """`caught`, `NOT CAUGHT`, or why there is none."""
        file = self.root / mutant.file
        source = file.read_text() if file.exists() else ""
        faulty = mutant.apply(source)
        if faulty is None:
            return "no such text any more"
        file.write_text(faulty)
        try:
            code = self._run_tests(select_tests([mutant.file]), processes)
        finally:
            file.write_text(source)
        return {_EXIT_PASSED: "NOT CAUGHT", _EXIT_FAILED: "caught", _EXIT_BROKEN: "caught"}.get(
            code, f"pytest ended with {code}"
        )

    def _run_tests(self, tests: list[str], processes: str) -> int:
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        command = [".venv/bin/python", "-m", "pytest", "-x", "-n", processes, *tests]
        command += ["--dist", "loadfile", "-o", f"timeout={_TEST_SECONDS}"]
        command += ["--hypothesis-profile", "whole"]
        log = self.root / "pytest.log"
        with log.open("w") as output:
            return subprocess.run(command, cwd=self.root, stdout=output, stderr=output).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="write a list of faults")
    drawing.add_argument("--seed", type=int, default=1)
    drawing.add_argument("--count", type=int, default=30)
    running = commands.add_parser("run", help="run the tests against each fault of a list")
    running.add_argument("--processes", default="2", help="as pytest's -n")
    for command in (drawing, running):
        command.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        mutants = draw(options.seed, options.count)
        options.file.write_text(json.dumps([asdict(one) for one in mutants], indent=1) + "\n")
        print("\n".join(map(str, mutants)))
        return
    caught = 0
    mutants = [Mutant(**fields) for fields in json.loads(options.file.read_text())]
    with Copy() as copy:
        for mutant in mutants:
            began = time.monotonic()
            verdict = copy.verdict(mutant, options.processes)
            caught += verdict == "caught"
            print(f"{verdict:10} {time.monotonic() - began:4.0f} s  {mutant}", flush=True)
    print(f"{caught} of {len(mutants)} caught")


if __name__ == "__main__":
    main()
