"""kubectl, as tests want it: text or JSON out, an error with the server's words otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.harness.api import Api, Unanswered
from tests.cluster.harness.waiting import PATIENCE, wait_until

Manifest = Mapping[str, Any]

# Thousands of calls of milliseconds: no thread and no garbage collector is worth its start.
_SHORT_LIVED = {"GOMAXPROCS": "1", "GOGC": "off"}


class KubectlError(RuntimeError):
    """kubectl ended with an error; `stderr` is what it said."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")
        self.stderr = stderr


@dataclass(frozen=True)
class Kubectl:
    """Runs one kubectl with one kubeconfig.

    `api` may answer, with the same credentials and without a program, what only reads.
    """

    program: Path
    kubeconfig: Path
    api: Api | None = None

    def run(self, *arguments: str, text: str | None = None, timeout: float = PATIENCE) -> str:
        """Returns standard output; `text` goes to standard input. Raises `KubectlError`."""
        outcome = subprocess.run(
            [str(self.program), f"--kubeconfig={self.kubeconfig}", *arguments],
            env={**os.environ, **_SHORT_LIVED},
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if outcome.returncode != 0:
            raise KubectlError(arguments, outcome.stderr)
        return outcome.stdout

    def json(self, *arguments: str) -> Any:
        """`run` with `--output=json`, parsed."""
        if arguments[0] == "get" and self.api is not None:
            with contextlib.suppress(Unanswered):
                answer = self.api.read(*arguments[1:])
                if answer is not None:
                    return answer
        return json.loads(self.run(*arguments, "--output=json"))

    def get(self, *arguments: str) -> Any | None:
        """One resource, or None when there is none of that name."""
        if self.api is not None:
            with contextlib.suppress(Unanswered):
                return self.api.read(*arguments)
        answer = self.run("get", *arguments, "--output=json", "--ignore-not-found")
        return json.loads(answer) if answer.strip() else None

    def items(self, *arguments: str) -> list[Any]:
        """The items of a `get` of several resources."""
        found: list[Any] = self.json("get", *arguments)["items"]
        return found

    def apply(self, *manifests: Manifest | str, namespace: str | None = None) -> None:
        """Server-side apply of dictionaries or YAML texts, in one call.

        `namespace` is for manifests that name none; all of a call must then belong there.
        """
        documents = [m if isinstance(m, str) else json.dumps(m) for m in manifests]
        scope = [] if namespace is None else [f"--namespace={namespace}"]
        self.run(
            "apply", "--server-side", "--force-conflicts", *scope, "--filename=-",
            text="\n---\n".join(documents),
        )  # fmt: skip

    def patch(self, *arguments: str, body: Any, kind: str = "merge") -> None:
        """PATCH of one resource; kind is json, merge or strategic."""
        self.run("patch", *arguments, f"--type={kind}", f"--patch={json.dumps(body)}")

    def delete(self, *arguments: str, wait: bool = True) -> None:
        """Deletes what the arguments name; what is gone already is no error."""
        self.run("delete", *arguments, "--ignore-not-found", f"--wait={str(wait).lower()}")

    def wait_for(
        self, *arguments: str, that: Callable[[Any], object], what: str, timeout: float = PATIENCE
    ) -> Any:
        """Waits until a resource exists and satisfies `that`; returns it."""

        def satisfied() -> Any | None:
            found = self.get(*arguments)
            return found if found is not None and that(found) else None

        return wait_until(satisfied, f"{' '.join(arguments)}: {what}", timeout=timeout)

    def wait_established(self, crd: str) -> None:
        """Waits until the server serves a definition. (`kubectl wait` fails on one that is so new
        that it has no conditions yet.)"""

        def established(definition: Any) -> bool:
            conditions = definition.get("status", {}).get("conditions") or []
            return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

        self.wait_for("crd", crd, that=established, what="is established")


def condition(resource: Any, kind: str) -> str:
    """The status of a resource's condition: True, False, Unknown, or empty when absent."""
    for found in resource.get("status", {}).get("conditions", []):
        if found["type"] == kind:
            return str(found["status"])
    return ""
