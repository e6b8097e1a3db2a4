"""`radixgrove doctor`: what this machine and this configuration are good for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from radixgrove.cli.configuration import redact, show
from radixgrove.cli.redis_server import HOW_TO_GET, find_binary
from radixgrove.cli.resolving import UpParts, resolve_part
from radixgrove.protocol.settings import (
    AttentionChoice,
    Device,
    DType,
    KVDType,
    RouterSettings,
    WorkerSettings,
)
from radixgrove.service import exit_codes
from radixgrove.service.listening import bound_socket

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
_MIN_REDIS = (6, 2)
_UNTRIED_PYTHON = (3, 14)
_HOPPER = 9  # major number of the compute capability
# docs/performance.md has both figures.
_GAIN = "FlashInfer computes 1.15 times Triton's tokens of prompts a second (Llama-3.1-8B, H200)"
_HOW_TO_COMPILE = "`radixgrove compile-kernels` compiles it, without a GPU"
_HOW_TO_INSTALL = f"pip install 'radixgrove[cuda]'; then {_HOW_TO_COMPILE}"


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
    parts = UpParts(path, {})
    router: RouterSettings = parts.router.settings
    # Addresses as a lone worker would use them; `up` chooses free ones.
    worker: WorkerSettings = resolve_part("worker", path, {}).settings
    failed = False
    checks: list[Callable[[], Iterable[Finding]]] = [
        _versions,
        lambda: _gpus(worker),
        lambda: _host_cache(worker),
        lambda: _redis(worker.redis_url or router.redis_url),
        lambda: _ports("router", router),
        lambda: _ports("worker", worker),
        lambda: _model(worker),
        lambda: _settings(
            [("router", parts.router.sources, router), ("worker", parts.worker.sources, worker)]
        ),
    ]
    for check in checks:
        for finding in check():
            failed |= finding.verdict is Verdict.FAIL
            if as_json:
                click.echo(json.dumps(finding.__dict__))
            else:
                click.echo(f"{finding.verdict:<5}{finding.subject:<12}{finding.text}")
    return exit_codes.FAILED if failed else exit_codes.OK


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
        yield Finding(Verdict.WARN, "libraries", f"absent: {', '.join(missing)}")
    yield from _machine()


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
    wanted = settings.device is Device.CUDA
    if not gpus:
        verdict = Verdict.FAIL if wanted else Verdict.OK
        yield Finding(verdict, "gpu", "none: workers run on the CPU")
    elif settings.tp > len(gpus):
        yield Finding(Verdict.FAIL, "gpu", f"tp {settings.tp} needs more than {len(gpus)} GPUs")
    on_gpu = bool(gpus) and settings.device is not Device.CPU
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
    from radixgrove.worker.agent.demo_model import NAME, default_cache_dir

    demo = settings.model == "demo"
    try:
        return load_config(
            default_cache_dir() / NAME if demo else Path(settings.model).expanduser()
        )
    except ModelError:
        return None


def _host_cache(settings: WorkerSettings) -> Iterable[Finding]:
    """Whether there is memory for it: a worker takes it whole when it starts."""
    wanted = settings.host_cache_gib
    if not wanted:
        return
    import psutil

    from radixgrove.service.machine import memory_limit

    limit, available = memory_limit(), psutil.virtual_memory().available
    text = (
        f"{wanted:g} GiB of host memory for cached pages: the limit is {limit / 2**30:.1f} GiB, "
        f"{available / 2**30:.1f} GiB of the machine are free"
    )
    if wanted * 2**30 >= limit:
        yield Finding(Verdict.FAIL, "host cache", f"{text}; lower host_cache_gib")
    else:
        enough = wanted * 2**30 < available
        yield Finding(Verdict.OK if enough else Verdict.WARN, "host cache", text)


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


def _ports(part: str, settings: RouterSettings | WorkerSettings) -> Iterable[Finding]:
    for host, port in (
        (settings.host, settings.port),
        (settings.management_host, settings.management_port),
    ):
        try:
            bound_socket(host, port).close()
        except OSError as error:
            # Not a failure: most likely the cluster that is to be looked at runs already.
            yield Finding(Verdict.WARN, "port", f"{part} {host}:{port}: {error.strerror}")
        else:
            yield Finding(Verdict.OK, "port", f"{part} {host}:{port} is free")


def _model(worker: WorkerSettings) -> Iterable[Finding]:
    model = worker.model
    if model == "demo":
        from radixgrove.worker.agent.demo_model import NAME, default_cache_dir, is_ready

        ready = is_ready(default_cache_dir() / NAME)
        text = "converted" if ready else "will be downloaded (93 MB) and converted at first use"
        yield Finding(Verdict.OK, "model", f"demo: {text}")
        return
    path = Path(model).expanduser()
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        yield Finding(Verdict.FAIL, "model", f"{path} lacks {', '.join(missing)}")
        return
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    verdict = Verdict.OK if weights else Verdict.FAIL
    kind = json.loads((path / "config.json").read_bytes()).get("architectures")
    yield Finding(verdict, "model", f"{path}: {kind}, {weights / 1e9:.2f} GB of safetensors")
    yield _format(path, worker)


def _format(path: Path, worker: WorkerSettings) -> Finding:
    """How the model is taken to write reasoning and tool calls."""
    from radixgrove.protocol.formats.table import UnknownFormatError
    from radixgrove.protocol.text.tokenizer import TokenizerError, TokenizerFiles

    try:
        form = TokenizerFiles.load(path, worker).format
    except (TokenizerError, UnknownFormatError) as error:
        return Finding(Verdict.FAIL, "output", str(error))
    verdict = Verdict.OK if form.calls is not None else Verdict.WARN
    text = str(form) if form.calls is not None else f"{form}: requests with tools are refused"
    return Finding(verdict, "output", text)


def _settings(parts: Iterable[tuple[str, dict[str, str], object]]) -> Iterable[Finding]:
    for part, sources, settings in parts:
        changed = [
            f"{name}={show(getattr(settings, name))}"
            for name, source in sources.items()
            if source != "default"
        ]
        yield Finding(Verdict.OK, part, " ".join(changed) or "all settings at their defaults")
