"""What must hold before a worker's processes start: a model, a port of its own, names."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from radixgrove.protocol.ranks import UnsupportedRanks, check_ranks
from radixgrove.protocol.settings import WorkerSettings, overlap
from radixgrove.protocol.words import counted
from radixgrove.service import exit_codes, logs
from radixgrove.service.supervisor import Supervised
from radixgrove.worker.agent import demo_model
from radixgrove.worker.execution import openmp_waits
from radixgrove.worker.parallel.rendezvous import MeetingPoint
from radixgrove.worker.runtime import Runtime

_SPINS = 1000  # turns of a loop of GNU's OpenMP: some microseconds
# Products that torch and oneDNN keep prepared, each in a cache of its own: one for every shape of a
# weight and count of tokens. By default 1,024, which take 1.4 MiB each with 960 × 576 in float32.
_ONEDNN_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONVERT = "AutoTokenizer of transformers converts it (from_pretrained, save_pretrained)"
# What a model's directory must have, and what others that people name have instead.
_NEEDED = {
    "config.json": {
        "adapter_config.json": ": it is an adapter (LoRA); merge it into its model and save that",
        "snapshots": ": it is the hub's cache of a model; name the directory below snapshots/",
        "params.json": ", but a params.json: take the model in transformers' form",
    },
    "tokenizer.json": {
        "tokenizer.model": f", but a tokenizer.model: {_CONVERT}",
        "vocab.json": f", but a vocab.json: {_CONVERT}",
        "tiktoken.model": f", but a tiktoken.model: {_CONVERT}",
        "tekken.json": ", but a tekken.json: take the model in transformers' form",
    },
}


class AgentError(exit_codes.CodedStartFailed):
    """The worker cannot start or go on; the text says what to do."""


class UnusableGroup(AgentError):
    """Settings, or variables of a launcher, that make no group."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_codes.USAGE)


def with_group(settings: WorkerSettings, environ: Mapping[str, str]) -> WorkerSettings:
    """Fill in, from the variables that launchers of groups set, where this machine stands in its
    group; what is set otherwise goes first.

    Raises:
        UnusableGroup: a variable is no number of machines.
    """
    found: dict[str, int | str] = {}
    for field, variable in (("nodes", "NNODES"), ("node_rank", "NODE_RANK")):
        value = environ.get(variable)
        if value is not None and field not in settings.model_fields_set:
            if not value.isdecimal() or (field == "nodes" and int(value) < 1):
                raise UnusableGroup(f"{variable} is {value!r}, which is no number of machines")
            found[field] = int(value)
    if settings.master is None and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        found["master"] = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return settings.model_copy(update=found)


def check_group(settings: WorkerSettings, environ: Mapping[str, str]) -> None:
    """Refuse a group that this worker cannot run, and machines that cannot prove themselves.

    The operator says in the environment how many ranks a group has.

    Raises:
        UnusableGroup: the text says which setting to change.
    """
    tp, pp, dp = settings.tp, settings.pp, settings.dp
    ranks = tp * pp * dp
    if "GROUP_MARKER" in environ:
        said = environ.get("WORLD_SIZE", "")
        if not said.isdecimal():
            raise UnusableGroup(f"WORLD_SIZE is {said!r}, which is no number")
        ranks = int(said)
    try:
        check_ranks(tp=tp, pp=pp, dp=dp, ep=settings.ep, ranks=ranks, nodes=settings.nodes)
    except UnsupportedRanks as error:
        raise UnusableGroup(str(error)) from error
    if settings.node_rank >= settings.nodes:
        machines = counted(settings.nodes, "machine")
        raise UnusableGroup(f"node_rank {settings.node_rank} is none of {machines}, from 0")
    if settings.nodes > 1:
        _check_machines(settings)


def _check_machines(settings: WorkerSettings) -> None:
    if settings.master is None:
        raise UnusableGroup(
            f"a group of {settings.nodes} machines needs --master HOST:PORT, where machine 0 is met"
        )
    try:
        master = MeetingPoint.at(settings.master)
    except ValueError as error:
        raise UnusableGroup(str(error)) from error
    for flag, host, port in (
        ("--port", settings.host, settings.port),
        ("--management-port", settings.management_host, settings.management_port),
    ):
        if settings.node_rank == 0 and port == master.port and overlap(host, master.host):
            raise UnusableGroup(f"--master and {flag} have one port, {port}: change one of them")
    if settings.internal_key is None and settings.cluster_secret is None:
        raise UnusableGroup(
            "a group of several machines needs internal_key (RADIXGROVE_INTERNAL_KEY): its ranks "
            "prove themselves by it"
        )


def openmp_waiting(environ: Mapping[str, str], *, follows_load: bool) -> dict[str, str]:
    """How threads of a process wait for each other, unless the user has said it.

    Nothing is said to one that follows the load of its cores. Others spin for microseconds: GNU's
    own 300,000 turns are some milliseconds, in which one that spins may keep the one from running
    that it waits for.
    """
    if openmp_waits.are_said(environ) or follows_load:
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS)}


def onednn_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """How much an engine on a CPU prepares for token counts that may come again, unless the user
    has said it."""
    return {name: bound for name, bound in _ONEDNN_CACHES.items() if name not in environ}


def engine_part(module: str, runtime: Runtime, rank: int) -> Supervised:
    """An engine's rank: a module that is run with the runtime directory and its number."""
    follows_load = openmp_waits.follows_load(runtime.settings, os.environ)
    return _part(f"engine rank {rank}", module, runtime, rank, follows_load=follows_load)


def frontend_part(module: str, runtime: Runtime, index: int) -> Supervised:
    """A frontend: a module that is run with the runtime directory and its number."""
    return _part(f"frontend {index}", module, runtime, index, follows_load=False)


def _part(
    name: str, module: str, runtime: Runtime, index: int, *, follows_load: bool
) -> Supervised:
    command = [sys.executable, "-m", module, str(runtime.directory), str(index)]
    environ = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **openmp_waiting(os.environ, follows_load=follows_load),
        **onednn_caches(os.environ),
    }
    return Supervised(name, command, environ, logs.STDERR.write, restart=False)


def resolve_model(model: str) -> Path:
    """The local Hugging Face directory that `model` means.

    Raises:
        AgentError: there is no such directory, or it is none of a model.
        DemoModelError: the demo model cannot be made.
    """
    return demo_model.ensure() if model == "demo" else model_directory(model)


def model_directory(model: str) -> Path:
    """The directory of a model that is not the demo model.

    Raises:
        AgentError: there is no such directory, or it is none of a model.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        on_hub = _HUB_ID.fullmatch(model)
        how = f"; to have it from the hub: hf download {model} --local-dir DIRECTORY"
        raise AgentError(
            f"model {model!r} is not a directory: pass a local Hugging Face directory, or `demo`"
            f"{how if on_hub else ''}",
            exit_codes.MODEL,
        )
    for name, instead in _NEEDED.items():
        if not (path / name).is_file():
            hint = next((text for file, text in instead.items() if (path / file).exists()), "")
            raise AgentError(f"model directory {model!r} has no {name}{hint}", exit_codes.MODEL)
    return path.resolve()


def resolve_settings(settings: WorkerSettings, model_dir: Path, port: int) -> WorkerSettings:
    """Fill in what the other processes rely on: port, names, and the URL routers use."""
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return settings.model_copy(
        update={
            "port": port,
            "served_model_name": settings.served_model_name or [model_dir.name],
            "replica_id": settings.replica_id or f"{host}:{port}",
            "advertise_url": settings.advertise_url or f"http://{name}:{port}",
        }
    )
