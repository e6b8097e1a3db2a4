"""What must hold before a worker's processes start: a model, a port of its own, names."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.ranks import UnsupportedRanks, check_ranks
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.service.listening import bound_socket
from radixgrove.worker.agent import demo_model

# What says how GNU's OpenMP waits, and for how many turns of a loop it spins here.
_OPENMP_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_SPINS = 1000


class AgentError(StartFailed):
    """The worker cannot start or go on; the text says what to do, `code` is the exit code."""

    def __init__(self, message: str, code: int = exit_codes.FAILED) -> None:
        super().__init__(message)
        self.code = code


def check_group(settings: WorkerSettings, environ: Mapping[str, str]) -> None:
    """Refuse a group that this worker cannot run; the operator says in the environment how it is.

    Raises:
        AgentError: its ranks are not the `tp` ones of one node.
    """
    if "GROUP_MARKER" not in environ:
        return
    ranks, nodes = (environ.get(name, "") for name in ("WORLD_SIZE", "NNODES"))
    if not (ranks.isdecimal() and nodes.isdecimal()):
        raise AgentError(f"WORLD_SIZE {ranks!r} and NNODES {nodes!r} are no numbers")
    try:
        check_ranks(tp=settings.tp, ranks=int(ranks), nodes=int(nodes))
    except UnsupportedRanks as error:
        raise AgentError(str(error)) from error


def openmp_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """How threads of an engine wait for each other, unless the user has said it.

    They spin for as long as the next operation takes to come, then sleep. GNU's default of 300,000
    turns is some 10 ms: where others use the cores too, threads spin for one that does not run.
    """
    if _OPENMP_WAITING & environ.keys():
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS)}


def resolve_model(model: str) -> Path:
    """The local Hugging Face directory that `model` means.

    Raises:
        AgentError: there is no such directory, or it is none of a model.
        DemoModelError: the demo model cannot be made.
    """
    if model == "demo":
        return demo_model.ensure()
    path = Path(model).expanduser()
    if not path.is_dir():
        raise AgentError(
            f"model {model!r} is not a directory: pass a local Hugging Face directory, or `demo`",
            exit_codes.MODEL,
        )
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise AgentError(f"model directory {model!r} has no {name}", exit_codes.MODEL)
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


@contextlib.contextmanager
def reserved_port(settings: WorkerSettings) -> Iterator[int]:
    """Hold the API port for the frontends, which share it by SO_REUSEPORT.

    The socket never listens, so the kernel hands it no connection. A first bind without
    SO_REUSEPORT finds a stranger on the port that a shared bind would silently join.

    Raises:
        AgentError: the port is taken or the address not ours.
    """
    try:
        if settings.port:
            bound_socket(settings.host, settings.port).close()
        holder = bound_socket(settings.host, settings.port, shared=True)
    except OSError as error:
        raise AgentError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "choose another with --port (0: any free one)"
        ) from error
    with holder:
        yield holder.getsockname()[1]
