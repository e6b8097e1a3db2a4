"""Machines of a group: network namespaces with an address each, or else loopback addresses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from radixgrove.worker.agent.agent import Modules
from tests.checkout import ROOT
from tests.ports import PROCESS, find_free_port
from tests.worker.execution import tiny
from tests.worker.spoken import Spoken

_SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_running": 8,
    "kv_tokens": 2048,
    "cpu_threads": 1,
    "frontends": 1,
    "drain_timeout": 5.0,
    "step_timeout": 3.0,
    "internal_key": "a key of the installation",
    "management_key": "a management key",
    "host_cache_gib": 0.0,
}


ENDS_WITHIN = 10.0 + 20.0  # seconds: the promise, and what a busy machine of tests adds

_numbers = count()


@dataclass
class Network:
    """`prefixes` of commands put them on a machine; `addresses` are theirs."""

    addresses: list[str]
    prefixes: list[list[str]]
    links: list[str]  # of each machine, on this side; none without namespaces
    spaces: list[str]  # of each machine; none without namespaces

    def give_gpus(self) -> None:
        """Each machine sees one GPU, and NCCL takes it for a host of its own."""
        for machine, (prefix, space) in enumerate(zip(self.prefixes, self.spaces, strict=True)):
            prefix += ["env", f"CUDA_VISIBLE_DEVICES={machine}", f"NCCL_HOSTID={space}"]

    def cut(self, machine: int) -> None:
        """Packets of a machine go nowhere from now on, and no end hears of it."""
        _ip("link", "set", self.links[machine], "nomaster")


@contextmanager
def network(machines: int) -> Iterator[Network]:
    if os.geteuid() != 0 or not _can_make_namespaces():
        addresses = [f"127.77.0.{machine + 1}" for machine in range(machines)]
        yield Network(addresses, [[] for _ in addresses], [], [])
        return
    # Several at a time, of several processes of tests, and of several runs of them.
    number = next(_numbers)
    name = f"rg{os.getpid() % 100_000}{chr(ord('a') + number)}"
    subnet = f"10.{200 + PROCESS % 50}.{(os.getpid() + number) % 250}"
    _ip("link", "add", f"{name}br", "type", "bridge")
    try:
        _ip("addr", "add", f"{subnet}.254/24", "dev", f"{name}br")
        _ip("link", "set", f"{name}br", "up")
        spaces = [f"{name}-{machine}" for machine in range(machines)]
        links = [f"{name}v{machine}" for machine in range(machines)]
        for host, (space, link) in enumerate(zip(spaces, links, strict=True), 1):
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", link, "master", f"{name}br", "up")
            _ip("-n", space, "addr", "add", f"{subnet}.{host}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        addresses = [f"{subnet}.{host}" for host in range(1, machines + 1)]
        prefixes = [["ip", "netns", "exec", space] for space in spaces]
        yield Network(addresses, prefixes, links, spaces)
    finally:
        for machine in range(machines):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{name}-{machine}")
        _ip("link", "del", f"{name}br")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _can_make_namespaces() -> bool:
    name = f"rg{os.getpid() % 100_000}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class MachineProcess(Spoken):
    """`radixgrove worker` on one machine of a group."""

    patience = 120.0

    def __init__(
        self, address: str, port: int, process: subprocess.Popen[bytes], log: IO[bytes]
    ) -> None:
        super().__init__(process, Path(f"/proc/self/fd/{log.fileno()}"))
        self._file = log  # it has no name, and ends with this
        self.address = address
        self.port = port

    def rank(self, rank: int) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [
            child
            for child in children
            if "radixgrove.worker.engine.loop" in child.cmdline()
            and child.cmdline()[-1] == str(rank)
        ]
        return found

    def readiness(self) -> tuple[int, str]:
        """Status and text of `/readyz`."""
        status, body = self.get("/readyz")
        return status, msgspec.json.decode(body).get("status", "")

    def get(self, path: str, port: int | None = None, key: str = "") -> tuple[int, bytes]:
        return self._open(urllib.request.Request(self._url(path, port), headers=_bearer(key)))

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """A body of bytes is sent as it is."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = headers or {"Content-Type": "application/json"}
        return self._open(urllib.request.Request(self._url(path), content, headers))

    def _url(self, path: str, port: int | None = None) -> str:
        return f"http://{self.address}:{port or self.port}{path}"

    def _open(self, request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def management(self) -> Any:
        """The machine's `/status`."""
        found = re.search(r"management port: [\d.]+:(\d+)", self.output)
        assert found, self.output
        return msgspec.json.decode(self.get("/status", int(found[1]), "a management key")[1])


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def served_model(directory: Path) -> Path:
    """A small model with words for tokens."""
    tiny.save("llama3-rope", directory)
    add_words(directory, tiny.VOCAB)
    return directory


def add_words(directory: Path, vocab_size: int) -> None:
    """A tokenizer whose tokens are words, `w0` and so on."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


@contextmanager
def group(
    net: Network, model_dir: Path, *, frontend: str = Modules.frontend, **changes: Any
) -> Iterator[list[MachineProcess]]:
    """A worker on every machine of the network, one stage on each; `frontend` is a module."""
    machines = len(net.addresses)
    rendezvous, port, management = find_free_port(), find_free_port(), find_free_port()
    started = []
    try:
        for number, (address, prefix) in enumerate(zip(net.addresses, net.prefixes, strict=True)):
            settings = {
                **_SETTINGS,
                "model": str(model_dir),
                "pp": machines,
                "nodes": machines,
                "node_rank": number,
                "master": f"{net.addresses[0]}:{rendezvous}",
                "host": address,
                "port": port,
                "management_host": address,
                "management_port": management,
                **changes,
            }
            script = (
                "import json, sys\n"
                "from radixgrove.protocol.settings import WorkerSettings\n"
                "from radixgrove.worker.agent.agent import Modules, run\n"
                "settings = WorkerSettings.model_validate(json.loads(sys.argv[1]))\n"
                "sys.exit(run(settings, Modules(frontend=sys.argv[2])))"
            )
            command = [
                *prefix,
                sys.executable,
                "-c",
                script,
                msgspec.json.encode(settings).decode(),
                frontend,
            ]
            log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            process = subprocess.Popen(command, cwd=ROOT, stderr=log)
            started.append(MachineProcess(address, port, process, log))
        yield started
    finally:
        for machine in started:
            _kill(machine)


def _kill(machine: MachineProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(machine.process.pid)
        for process in [family, *family.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    machine.process.wait()
