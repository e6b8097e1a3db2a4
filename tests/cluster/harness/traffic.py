"""Load on the router's Service from inside the cluster, and what became of each request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from tests.checkout import ROOT
from tests.cluster.harness import pods
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import PATIENCE, wait_until


@dataclass(frozen=True)
class Outcome:
    """One request; `failure` is empty when the whole answer came."""

    began: float  # Unix seconds
    seconds: float
    text: str  # as much as came
    failure: str


@dataclass(frozen=True)
class Client:
    """A pod from which requests are sent; nothing but the API is open to it."""

    kubectl: Kubectl
    namespace: str
    name: str

    @classmethod
    def start(
        cls, kubectl: Kubectl, namespace: str, image: str, mounts: Mounts, name: str = "client"
    ) -> Client:
        """`image` is an environment image and `mounts` what `volumes.claim_environment` gave."""
        manifest = pods.pod(
            name, image, ["sleep", "infinity"],
            volumes=mounts.volumes, volume_mounts=mounts.volume_mounts,
        )  # fmt: skip
        kubectl.apply(manifest, namespace=namespace)
        pods.wait_until_ready(kubectl, namespace, name)
        return cls(kubectl, namespace, name)

    def python(self, code: str, *arguments: str, timeout: float = PATIENCE) -> str:
        """Runs a few lines of Python in the pod and returns what they print."""
        return self.kubectl.run(
            "exec", self.name, "-n", self.namespace, "--", "/usr/bin/python3", "-c", code,
            *arguments, timeout=timeout,
        )  # fmt: skip

    def ask(self, url: str, model: str, question: str) -> str:
        """The answer to one question, greedy and short.

        The way to the router is tried again while there is none: a Service reaches each node in
        its own time. What the router answers counts at once.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
        }
        address = f"{url}/chat/completions"
        return self.python(_ASK, address, json.dumps(body), timeout=400).strip()


class Traffic:
    """`clients` streams at any time, from entering to leaving this context manager.

    Each of their requests waits `patience` seconds for its whole answer. On leaving, requests under
    way are let finish.
    """

    def __init__(
        self,
        client: Client,
        url: str,
        model: str,
        *,
        clients: int = 2,
        tokens: int = 16,
        patience: float = 240,
    ) -> None:
        self._client = client
        self._arguments = (url, model, str(clients), str(tokens), str(patience))
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Traffic:
        where, kubectl = self._client, self._client.kubectl
        module = "tests.cluster.harness.traffic_source"
        self._process = subprocess.Popen(
            [
                str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}", "exec", "--stdin",
                where.name, "-n", where.namespace, "--", "env", f"PYTHONPATH={ROOT}",
                f"{sys.prefix}/bin/python", "-m", module, *self._arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(300)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(10)
        if error is None and status != 0:
            raise RuntimeError(f"the source of traffic ended with status {status}")

    @property
    def failures(self) -> list[str]:
        return [outcome.failure for outcome in self.outcomes if outcome.failure]

    def wait_for_more(self, count: int) -> None:
        """Waits until that many further requests have finished."""
        wanted = len(self.outcomes) + count
        self.wait_for(lambda seen: len(seen) >= wanted, f"{count} more requests finish")

    def wait_for(self, that: Callable[[Sequence[Outcome]], bool], what: str) -> None:
        """Waits until the requests that have finished satisfy `that`."""
        wait_until(
            lambda: that(self.outcomes) or self._process.poll() is not None, what, timeout=300
        )
        if self._process.poll() is not None:
            raise RuntimeError("the source of traffic has ended")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.outcomes.append(Outcome(**json.loads(line)))


_ASK = """
import json, sys, time, urllib.error, urllib.request as r
request = r.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
deadline = time.monotonic() + 60
while True:
    try:
        answer = r.urlopen(request, timeout=300)
        break
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {error.read(500)}")
    except urllib.error.URLError as error:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
print(json.load(answer)["choices"][0]["message"]["content"])
"""
