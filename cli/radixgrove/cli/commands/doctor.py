"""`radixgrove doctor`: what this machine and this configuration are good for."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from radixgrove.cli.configuration import redact, show
from radixgrove.cli.redis_server import HOW_TO_GET, find_binary
from radixgrove.cli.resolving import ConfigurationUsage, UpParts, resolve_part
from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.settings import (
    AttentionChoice,
    Device,
    DType,
    KVDType,
    LoadFormat,
    RouterSettings,
    Transport,
    WorkerSettings,
)
from radixgrove.service import exit_codes
from radixgrove.service.listening import BindingError, listen, listen_for_management
from radixgrove.service.settings_check import check_settings

if TYPE_CHECKING:
    from radixgrove.protocol.model.config import ModelConfig

_LIBRARIES = (
    ("torch", "worker"),
    ("safetensors", "worker"),
    ("pyzmq", "worker"),
    ("fastapi", "router"),
    ("aiohttp", "router"),
    ("redis", "router"),
    ("tokenizers", "protocol"),
    ("transformers", "demo"),
    ("gguf", "demo"),
    ("flashinfer-python", "cuda"),
    ("kopf", "operator"),
)
# Modules without which a part does not start.
_NEEDED = {
    "router": ("aiohttp", "fastapi", "redis", "uvloop"),
    "worker": ("psutil", "safetensors", "torch", "zmq"),
}
_MIN_REDIS = (6, 2)
_UNTRIED_PYTHON = (3, 14)
_HOPPER = 9  # major number of the compute capability
# docs/performance.md has both figures.
_GAIN = "FlashInfer computes 1.15 times Triton's tokens of prompts a second (Llama-3.1-8B, H200)"
_HOW_TO_COMPILE = "`radixgrove compile-kernels` compiles it, without a GPU"
_HOW_TO_INSTALL = f"pip install 'radixgrove[cuda]'; then {_HOW_TO_COMPILE}"


_PartSettings = TypeVar("_PartSettings", RouterSettings, WorkerSettings)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    subject: str
    text: str


@click.command(help="Check this machine and the configuration; exits 1 when something fails.")
@click.option("--config", "path", metavar="FILE", help="YAML file of settings.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a finding, for reports.")
def doctor(path: str | None, as_json: bool) -> int:
    failed = False
    for finding in _findings(path):
        failed |= finding.verdict is Verdict.FAIL
        if as_json:
            click.echo(json.dumps(finding.__dict__))
        else:
            click.echo(f"{finding.verdict:<5}{finding.subject:<12}{finding.text}")
    return exit_codes.FAILED if failed else exit_codes.OK


def _findings(path: str | None) -> Iterator[Finding]:
    parts = UpParts(path, {})
    router: RouterSettings = parts.router.settings
    lone = parts.worker
    try:
        # Addresses as a lone worker would use them; `up` chooses free ones.
        lone = resolve_part("worker", path, {})
    except ConfigurationUsage as error:
        yield Finding(Verdict.FAIL, "worker", error.format_message())
    absent = {part: _absent(modules) for part, modules in _NEEDED.items()}
    worker: WorkerSettings = lone.settings if absent["worker"] else _in_group(lone.settings)
    yield from _versions()
    yield from _not_installed(absent)
    if not absent["worker"]:
        yield from _machine()
        yield from _gpus(worker)
        yield from _host_cache(worker)
    yield from _redis(worker.redis_url or router.redis_url)
    if not absent["router"]:
        yield from _start("router", router, _check_router)
    if not absent["worker"]:
        yield from _start("worker", worker, _check_worker)
        yield from _model(worker)
    yield _settings("router", parts.router.sources, router)
    yield _settings("worker", lone.sources, worker)


def _absent(modules: Iterable[str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def _not_installed(absent: dict[str, list[str]]) -> Iterable[Finding]:
    """Parts that cannot run here: no fault where another can, as in an image of one part."""
    verdict = Verdict.FAIL if all(absent.values()) else Verdict.OK
    for part, modules in absent.items():
        if modules:
            text = f"none runs here without {', '.join(modules)}: pip install 'radixgrove[{part}]'"
            yield Finding(verdict, part, text)


def _versions() -> Iterable[Finding]:
    own = importlib.metadata.version("radixgrove")
    yield Finding(Verdict.OK, "radixgrove", own)
    python = ".".join(map(str, sys.version_info[:3]))
    tried = sys.version_info < _UNTRIED_PYTHON
    note = "" if tried else " (newer than any that Radixgrove was tried with)"
    yield Finding(
        Verdict.OK if tried else Verdict.WARN, "python", f"{python} {platform.platform()}{note}"
    )
    found, missing = [], []
    for name, extra in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name} [{extra}]")
    yield Finding(Verdict.OK, "libraries", ", ".join(found))
    if missing:
        # Parts, backend and demo model say below which of these they need.
        yield Finding(Verdict.OK, "libraries", f"absent: {', '.join(missing)}")


def _machine() -> Iterable[Finding]:
    """What this process may use, which in a container is less than there is."""
    from radixgrove.service.machine import cores, memory_limit

    text = f"{cores()} cores, {memory_limit() / 1e9:.0f} GB of memory"
    present = os.cpu_count() or 1
    if cores() < present:
        text += f" (of {present} cores: the rest is beyond this process's affinity or CPU quota)"
    yield Finding(Verdict.OK, "machine", text)


def _gpus(settings: WorkerSettings) -> Iterable[Finding]:
    """GPUs as nvidia-smi lists them: importing torch would take seconds and memory."""
    gpus = _visible_gpus()
    for line, _ in gpus:
        yield Finding(Verdict.OK, "gpu", line)
    on_gpu = bool(gpus) and settings.device is not Device.CPU
    if not gpus and settings.device is Device.CUDA:
        text = "device cuda is set, but nvidia-smi lists no GPU: install its driver"
        yield Finding(Verdict.FAIL, "gpu", f"{text}, or set device to auto or cpu")
    elif not gpus:
        yield Finding(Verdict.OK, "gpu", "none: workers run on the CPU")
    elif on_gpu and settings.transport is not Transport.GLOO:
        from radixgrove.worker.parallel.layout import lacks_device

        ranks = settings.tp * settings.pp * settings.dp // settings.nodes
        if why := lacks_device(ranks - 1, len(gpus)):
            yield Finding(Verdict.FAIL, "gpu", why)
    yield _backend(settings, gpus[0][1] if on_gpu else None)


def _visible_gpus() -> list[tuple[str, int]]:
    """What nvidia-smi says of each, and the major number of its compute capability."""
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return []
    query = "--query-gpu=index,name,memory.total,memory.used,driver_version,compute_cap"
    result = subprocess.run(
        [binary, query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if result.returncode != 0:
        return []
    lines = [line.rpartition(", ") for line in result.stdout.strip().splitlines()]
    return [(line, int(capability.partition(".")[0])) for line, _, capability in lines]


def _backend(settings: WorkerSettings, major: int | None) -> Finding:
    """What attention runs on; without a GPU (`major` None) also what it would run on with Hopper's.

    Decode is our own kernel whichever backend is named: they differ in how prompts are computed.
    """
    chosen = settings.attention_backend
    prefill = _prefill(settings, _HOPPER if major is None else major)
    if chosen is AttentionChoice.FLASHINFER and prefill.only_ours:
        text = f"attention {AttentionChoice.TRITON}, though flashinfer is set: {prefill.why}"
        return Finding(Verdict.OK, "backend", text)
    if chosen is AttentionChoice.FLASHINFER:
        verdict = Verdict.OK if prefill.by_flashinfer else Verdict.FAIL
        return Finding(verdict, "backend", f"attention flashinfer: {prefill.why}")
    if chosen is not AttentionChoice.AUTO:
        other = f"; auto takes flashinfer: {prefill.why}" if prefill.by_flashinfer else ""
        return Finding(Verdict.OK, "backend", f"attention {chosen}, as set{other}")
    ours = AttentionChoice.TRITON if importlib.util.find_spec("triton") else AttentionChoice.TORCH
    fastest = AttentionChoice.FLASHINFER if prefill.by_flashinfer else ours
    gain = f"; {_GAIN}" if prefill.by_flashinfer or prefill.can_improve else ""
    if major is None:
        text = f"attention auto: {AttentionChoice.TORCH} here, {fastest} on a GPU"
        return Finding(Verdict.OK, "backend", f"{text} ({prefill.why}){gain}")
    verdict = Verdict.WARN if prefill.can_improve else Verdict.OK
    return Finding(verdict, "backend", f"attention auto: {fastest} ({prefill.why}){gain}")


@dataclass(frozen=True)
class _Prefill:
    """What computes prompts on a GPU where it may be chosen, and why."""

    by_flashinfer: bool
    why: str
    can_improve: bool = False
    only_ours: bool = False  # whatever is set


def _prefill(settings: WorkerSettings, major: int) -> _Prefill:
    from radixgrove.worker.attention import flashinfer_kernels as flashinfer

    if settings.kv_dtype is KVDType.FP8_E4M3:
        return _Prefill(False, "FlashInfer does not read KV in float8")
    config = _config(settings)
    if config is not None and len(config.attention.windowed) == config.num_layers:
        return _Prefill(False, "all layers have a window, for which ours is used", only_ours=True)
    if config is not None and config.attention.sinks:
        return _Prefill(False, "attention has sinks, for which ours is used", only_ours=True)
    dtype = str(settings.dtype)
    if settings.dtype is DType.AUTO:
        dtype = config.dtype if config is not None else "bfloat16"
    dims = flashinfer.HEAD_DIMS if config is None else (config.attention.head_dim,)
    kernels = [k for dim in dims if (k := flashinfer.kernel_of(major, dtype, dim)) is not None]
    if not kernels:
        dim = f" of head dimension {config.attention.head_dim}" if config is not None else ""
        return _Prefill(False, f"FlashInfer has no kernels for {dtype}{dim}")
    if not flashinfer.is_installed():
        return _Prefill(False, f"FlashInfer is not installed: {_HOW_TO_INSTALL}", True)
    compiled = [kernel for kernel in kernels if flashinfer.prebuilt_library(kernel) is not None]
    if compiled:
        return _Prefill(True, f"compiled before the start: {'; '.join(map(str, compiled))}")
    toolkit = flashinfer.find_toolkit()
    what = "; ".join(map(str, kernels))
    if toolkit is not None:
        by = f"compiled at the first start, for minutes, by the nvcc of {toolkit.home}"
        return _Prefill(True, f"{by}: {what}; {_HOW_TO_COMPILE}")
    return _Prefill(
        False,
        f"no FlashInfer kernel is compiled ({what}) and no nvcc is here; {_HOW_TO_COMPILE}",
        True,
    )


def _config(settings: WorkerSettings) -> ModelConfig | None:
    """The model's; None where it is not there, or not one that is served."""
    from radixgrove.protocol.model.config import ModelError
    from radixgrove.protocol.model.directory import load_config
    from radixgrove.worker.agent import demo_model

    demo = settings.model == "demo"
    try:
        return load_config(demo_model.directory() if demo else Path(settings.model).expanduser())
    except ModelError:
        return None


def _host_cache(settings: WorkerSettings) -> Iterable[Finding]:
    """Whether there is memory for it: a worker takes it whole when it starts."""
    from radixgrove.worker.execution import host_room

    wanted, room = settings.host_cache_gib, host_room.describe_room()
    if not wanted:
        yield Finding(Verdict.OK, "host cache", f"none; host_cache_gib may be up to {room}")
    elif why := host_room.shortage(int(wanted * host_room.GIB) // settings.nodes):
        yield Finding(Verdict.FAIL, "host cache", f"host_cache_gib {wanted:g} {why}")
    else:
        yield Finding(Verdict.OK, "host cache", f"{wanted:g} GiB of up to {room}")


def _redis(url: str | None) -> Iterable[Finding]:
    if url is None:
        binary = find_binary()
        if importlib.util.find_spec("aiohttp") is None:
            # A worker's image: no router runs here, so there is no `up` that would start a Redis.
            yield Finding(Verdict.OK, "redis", "no redis_url: a worker serves alone without")
        elif binary is None:
            yield Finding(Verdict.FAIL, "redis", f"no redis_url, no redis-server: {HOW_TO_GET}")
        else:
            yield Finding(Verdict.OK, "redis", f"`up` starts {binary}")
        return
    if importlib.util.find_spec("redis") is None:
        yield Finding(Verdict.FAIL, "redis", "pip install 'radixgrove[router]'")
        return
    import redis

    from radixgrove.service.redis_client import connect
    from radixgrove.service.redis_rules import RedisUnsuitable, check_server

    try:
        client = connect(url, 3.0)
        info: dict[str, object] = client.info()
    except (redis.RedisError, OSError, ValueError) as error:
        yield Finding(Verdict.FAIL, "redis", f"{redact(url)}: {redact(str(error))}")
        return
    version = str(info.get("redis_version", "?"))
    new_enough = tuple(int(part) for part in version.split(".")[:2]) >= _MIN_REDIS
    verdict = Verdict.OK if new_enough else Verdict.FAIL
    yield Finding(verdict, "redis", f"{redact(url)}: version {version}")
    try:
        check_server(info)
    except RedisUnsuitable as error:
        yield Finding(Verdict.FAIL, "redis", str(error))


def _check_router(settings: RouterSettings) -> None:
    from radixgrove.router.main import check

    check(settings)


def _in_group(settings: WorkerSettings) -> WorkerSettings:
    """As a worker has them that a launcher of groups starts in this environment; as they are where
    that makes no sense, which is a finding about the worker."""
    from radixgrove.worker.agent.preparation import AgentError, with_group

    try:
        return with_group(settings, os.environ)
    except AgentError:
        return settings


def _check_worker(settings: WorkerSettings) -> None:
    from radixgrove.worker.agent.preparation import check_group, with_group

    with_group(settings, os.environ)
    check_group(settings, os.environ)
    if settings.node_rank == 0:  # the others have no frontends
        check_settings(settings)


def _start(
    part: str, settings: _PartSettings, check: Callable[[_PartSettings], None]
) -> Iterable[Finding]:
    """What the part itself refuses before it starts anything, and its ports."""
    try:
        check(settings)
    except StartFailed as error:
        yield Finding(Verdict.FAIL, part, str(error))
        return
    yield _port(part, settings.host, settings.port, lambda: listen(settings.host, settings.port))
    yield _port(
        part,
        settings.management_host,
        settings.management_port,
        lambda: listen_for_management(settings),
    )


def _port(part: str, host: str, port: int, bind: Callable[[], socket.socket]) -> Finding:
    try:
        bind().close()
    except BindingError as error:
        # One in use is no failure: most likely what is to be looked at runs already.
        cause = error.__cause__
        in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        return Finding(Verdict.WARN if in_use else Verdict.FAIL, "port", f"{part} {error}")
    return Finding(Verdict.OK, "port", f"{part} {host}:{port} is free")


def _model(settings: WorkerSettings) -> Iterable[Finding]:
    """What a worker says of the model before it starts anything; the demo model is not fetched."""
    from radixgrove.protocol.model.config import ModelError
    from radixgrove.worker.agent import demo_model, model_files
    from radixgrove.worker.agent.preparation import model_directory

    demo = settings.model == "demo"
    try:
        if demo and not demo_model.is_ready(demo_model.directory()):
            demo_model.check_requirements(demo_model.default_cache_dir())
            text = "demo: will be downloaded (93 MB) and converted at first use, into"
            yield Finding(Verdict.OK, "model", f"{text} {demo_model.directory()}")
            return
        path = demo_model.directory() if demo else model_directory(settings.model)
        model = model_files.check_for(settings, path)
    except (ModelError, StartFailed) as error:
        yield Finding(Verdict.FAIL, "model", str(error))
        return
    yield Finding(Verdict.OK, "model", f"{path}: {_size(settings, path, model.config)}")
    for remark in model_files.remarks(model, settings):
        yield Finding(Verdict.WARN if remark.warns else Verdict.OK, "model", remark.text)


def _size(settings: WorkerSettings, path: Path, config: ModelConfig) -> str:
    from radixgrove.protocol.model.directory import weight_files
    from radixgrove.protocol.model.fit import count_parameters

    text = f"{count_parameters(config) / 1e9:.2f} billion parameters"
    if settings.load_format is not LoadFormat.SAFETENSORS:
        return text
    size = sum((path / name).stat().st_size for name in weight_files(path))
    return f"{text}, {size / 1e9:.2f} GB of safetensors"


def _settings(part: str, sources: dict[str, str], settings: object) -> Finding:
    changed = [
        f"{name}={show(getattr(settings, name))}"
        for name, source in sources.items()
        if source != "default"
    ]
    return Finding(Verdict.OK, part, " ".join(changed) or "all settings at their defaults")
