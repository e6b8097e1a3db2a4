"""Images: archives of static programs, a Debian base, and builds of real Dockerfiles."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.cluster.harness.build import cache_directory
from tests.cluster.harness.volumes import environment_directories

FOLDER = Path(__file__).resolve().parent.parent / "images"
_CERTIFICATES = Path("/etc/ssl/certs")
_BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_SUITE = "bookworm"
_KEPT_ARCHIVES = 3  # of one image
_KEPT_STAGES = 50  # of builds, about five gigabytes
_CHUNK = 1 << 20

# As root: makes the root file system read-only, then becomes a user and the command.
_READ_ONLY = """
mount -o remount,bind,ro / && mount -t tmpfs tmpfs /tmp || exit
user=$1 group=$2; shift 2
exec setpriv --reuid="$user" --regid="$group" --clear-groups -- "$@"
"""


class ImageError(RuntimeError):
    """An image could not be built; the message carries the end of the builder's output."""


@dataclass(frozen=True)
class Recipe:
    """What an image is built from: a Dockerfile, its context, build arguments.

    `BASE` is the image of `base`, or our own Debian.
    """

    name: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    base: Recipe | None = None

    def key(self) -> str:
        """Equal for equal images: a digest of all that the image is made of."""
        digest = hashlib.sha256(self.dockerfile.read_bytes())
        digest.update(json.dumps([self.name, *sorted(self.arguments.items())]).encode())
        digest.update((self.base.key() if self.base else _base_name()).encode())
        for path in sorted(self.files()):
            about = [str(path.relative_to(self.context)), path.stat().st_mode, path.stat().st_size]
            digest.update(json.dumps(about).encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def files(self) -> Iterator[Path]:
        """What its Dockerfile copies from the context."""
        for line in self.dockerfile.read_text().splitlines():
            instruction, *words = line.split() or [""]
            if instruction in ("COPY", "ADD") and not words[0].startswith("--from"):
                for source in (self.context / word for word in words[:-1]):
                    yield from _files(source) if source.is_dir() else [source]


def _files(directory: Path) -> Iterator[Path]:
    """What a directory holds, without what .dockerignore leaves out everywhere."""
    for path in directory.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path


def environment(name: str) -> Recipe:
    """An image that runs this checkout's code; see `volumes.claim_environment`."""
    mounted = " ".join(str(path) for path in environment_directories().values())
    arguments = {"DIRECTORIES": mounted, "ENVIRONMENT": sys.prefix}
    return Recipe(name, FOLDER / "environment" / "Dockerfile", FOLDER / "environment", arguments)


def build_image(recipe: Recipe) -> Path:
    """Builds an image with buildah and returns a docker-archive of it.

    Archives are kept in the user's cache by what they are made of, so an unchanged image costs
    nothing; layers are kept too, so a changed one costs seconds. Raises `ImageError`.
    """
    stem = recipe.name.replace("/", "_").replace(":", "_")
    archives = _store() / "archives"
    archive = archives / f"{stem}.{recipe.key()}.tar"
    with _alone(archives / f"{stem}.lock"):
        if not archive.exists():
            base = recipe.base
            if base is not None:
                # Of this very recipe, whatever the name has stood for in the store.
                _buildah("pull", f"docker-archive:{build_image(base)}")
            arguments = {"BASE": base.name if base else base_image(), **recipe.arguments}
            with _building():
                _build(recipe.name, recipe.dockerfile, recipe.context, arguments, layers=True)
                partial = archives / f"{stem}.partial"
                partial.unlink(missing_ok=True)
                _buildah("push", recipe.name, f"docker-archive:{partial}:{recipe.name}")
            partial.rename(archive)
            _prune()
        archive.touch()
        # Another cluster of this machine may still give an older one to its nodes.
        newest_first = sorted(archives.glob(f"{stem}.*.tar"), key=_modified, reverse=True)
        for old in newest_first[_KEPT_ARCHIVES:]:
            old.unlink()
    return archive


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Clusters of one machine build under the same names: they take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _building() -> Iterator[None]:
    """While no image has the layers of a build yet, or a container is in use, none is removed."""
    with (_store() / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _prune() -> None:
    """Removes stages that no name needs once there are many, unless somebody is building."""
    with (_store() / "building").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        unnamed = _buildah("images", "--quiet", "--filter=dangling=true").split()
        if len(unnamed) > _KEPT_STAGES:
            _buildah("rm", "--all")  # of builds that were interrupted: they hold their images
            _buildah("rmi", "--prune")


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _build(
    name: str, dockerfile: Path, context: Path, arguments: Mapping[str, str], *, layers: bool
) -> None:
    """`layers`: keep each of them, so that the next build is quick."""
    options = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    # The machine's own certificate authorities, for downloads through a proxy that has one.
    _buildah(
        "build", f"--layers={str(layers).lower()}", "--isolation=chroot",
        f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro", *options,
        f"--tag={name}", f"--file={dockerfile}", str(context),
    )  # fmt: skip


@contextmanager
def container_of(
    name: str, dockerfile: Path, context: Path, arguments: Mapping[str, str]
) -> Iterator[Container]:
    """Builds a Dockerfile, and removes container and image afterwards: for images that are too
    large to keep. Raises `ImageError`."""
    with _building():
        _build(name, dockerfile, context, arguments, layers=False)
        try:
            container = Container(_buildah("from", "--pull-never", name).strip(), name)
            try:
                yield container
            finally:
                _buildah("rm", container.identity)
        finally:
            _buildah("rmi", name)


@dataclass(frozen=True)
class Container:
    """A container in which commands run one by one, as the image's user."""

    identity: str
    image: str

    def run(
        self,
        *command: str,
        writable: Mapping[Path, str] | None = None,
        read_only: bool = False,
    ) -> str:
        """The command's output; `writable` mounts host directories at paths of the container.

        `read_only` as pods have it: nothing but those and an empty /tmp can be written to. Raises
        `ImageError`.
        """
        options = [f"--volume={host}:{inside}:rw" for host, inside in (writable or {}).items()]
        if read_only:
            user, group = self.config()["User"].split(":")
            options += ["--user=0", "--cap-add=CAP_SYS_ADMIN"]
            command = ("sh", "-c", _READ_ONLY, "sh", user, group, *command)
        return _buildah("run", "--isolation=chroot", *options, self.identity, "--", *command)

    def config(self) -> Any:
        """The image's OCI configuration."""
        return json.loads(_buildah("inspect", "--type=image", self.image))["OCIv1"]["config"]


def base_image() -> str:
    """A Debian with Python, made from the distribution's packages: no image hub is asked.

    For the `BASE` argument of the project's Dockerfiles. Raises `ImageError`.
    """
    packages, name = ",".join(_BASE_PACKAGES), _base_name()
    with _alone(_store() / "base.lock"):
        if _buildah("images", "--quiet", "--filter", f"reference={name}").strip():
            return name
        with tempfile.TemporaryDirectory(dir=cache_directory()) as directory:
            context = Path(directory)
            _run(
                ["mmdebstrap", "--quiet", "--variant=minbase", '--aptopt=Acquire::Retries "5"',
                 f"--include={packages}", _SUITE, str(context / "base.tar")]
            )  # fmt: skip
            (context / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
            _buildah("build", f"--tag={name}", str(context))
    return name


def _base_name() -> str:
    packages = hashlib.sha256(",".join(_BASE_PACKAGES).encode()).hexdigest()
    return f"localhost/radixgrove/base:{_SUITE}-{packages[:8]}"


def _store() -> Path:
    return cache_directory() / "images"


def _buildah(*arguments: str) -> str:
    store = _store()
    settings = store / "containers.conf"
    # Networks are not used here, but buildah would make their directory below /etc.
    text = f'[network]\nnetwork_config_dir = "{store / "networks"}"\n'
    if not settings.exists() or settings.read_text() != text:
        store.mkdir(parents=True, exist_ok=True)
        whole = store / f"containers.conf.{os.getpid()}"
        whole.write_text(text)
        whole.replace(settings)  # another process may be reading it
    # A mount namespace of its own, so that nothing stays mounted after a kill.
    return _run(
        ["unshare", "--mount", "buildah", f"--root={store / 'root'}", f"--runroot={store / 'run'}",
         "--storage-driver=overlay", *arguments],
        {**os.environ, "CONTAINERS_CONF": str(settings)},
    )  # fmt: skip


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    outcome = subprocess.run(
        command, stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True
    )
    if outcome.returncode != 0:
        output = f"{outcome.stdout}\n{outcome.stderr}"[-4000:]
        raise ImageError(f"{' '.join(command)} failed:\n{output}")
    return outcome.stdout


def scratch_image(
    archive: Path, name: str, program: Path, arguments: Sequence[str] = (), user: str = "65532"
) -> Path:
    """Writes a docker-archive `name` that holds one static program and starts it.

    An image without an operating system needs no builder: it is one layer and three JSON files.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.mode = 0o755
        entry.size = program.stat().st_size
        with program.open("rb") as content:
            tar.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}", *arguments], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    config_bytes = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_bytes).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
    _write_tar(
        archive,
        {
            f"{digest}.tar": layer.getvalue(),
            config_name: config_bytes,
            "manifest.json": json.dumps(manifest).encode(),
        },
    )
    return archive


def write_together(archives: Sequence[Path], output: IO[bytes]) -> None:
    """Writes the images of several docker-archives as one, with the layers they share once."""
    manifest: list[Any] = []
    written: set[str] = set()
    with tarfile.open(fileobj=output, mode="w|", bufsize=_CHUNK) as together:
        for archive in archives:
            with tarfile.open(archive) as tar:
                images = json.load(_member(tar, "manifest.json"))
                manifest += images
                for name in (n for image in images for n in (*image["Layers"], image["Config"])):
                    if name not in written:
                        written.add(name)
                        together.addfile(tar.getmember(name), _member(tar, name))
        _add(together, "manifest.json", json.dumps(manifest).encode())


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    content = tar.extractfile(name)
    assert content is not None, f"{name} is no file"
    return content


def _write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            _add(tar, name, content)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _architecture() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
