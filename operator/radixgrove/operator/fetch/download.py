"""Fetches a model into a directory, once: resumed after a cut, every file checked by its hash.

Runs in Jobs of the operator's image:

    python -m radixgrove.operator.fetch resolve  --source hf://ORG/REPO [--revision main]
    python -m radixgrove.operator.fetch download --source hf://ORG/REPO --revision SHA --into DIR
        [--tp 8 --pp 2 --dtype bfloat16 --quantize fp8 --max-model-len 32768 --memory BYTES]

With `--tp` the model's `config.json` is looked at before any weights are fetched: whether the
worker has the architecture, and whether the model fits what it is meant for.

The result is one line of JSON in the termination log: `{"revision": …}`, with `bytes` once they
are there, or `{"reason": …, "message": …}` for the service's conditions. Files arrive in
`DIR/incoming`, which becomes `DIR/snapshot` when all of them are there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from radixgrove.operator.fetch.sources import FetchError, RemoteFile, Source, open_source
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    load_config,
    weight_files,
)
from radixgrove.protocol.model.fit import Intended, check_fit
from radixgrove.protocol.text.tokenizer import TOKENIZER_JSON
from radixgrove.service import logs

logger = logging.getLogger(__name__)

SNAPSHOT = "snapshot"  # directory on the claim
UNFIT = "ModelDoesNotFit"  # the hardware or the engine; others may run it
HOPELESS = 3  # exit code of what another try would not change
_PASSING = {"DownloadFailed", "CacheBusy"}
_ATTEMPTS = 8  # without any progress in between
_WANTED = {".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"}
_LARGEST_COUNT = 10_000
_OTHER_SOURCE = "name one in model.source that has the model as transformers saves it"
_TURN = 600.0  # seconds to wait for another Job of the claim; the operator tries again later


def download(source: Source, into: Path, intended: Intended | None = None) -> int:
    """Fills `into/snapshot`; its bytes. A second run goes on where the first one stopped.

    `intended`: what the model must be fit for; None: whatever it is. Raises FetchError.
    """
    into.mkdir(parents=True, exist_ok=True)
    final, incoming = into / SNAPSHOT, into / "incoming"
    with _alone(into):
        if final.exists():
            logger.info("everything is there already")
            return _size(final)
        incoming.mkdir(exist_ok=True)
        files = wanted(source.files())
        if intended is not None:
            _check_config(source, files, incoming, intended)
        files = _named(source, files, incoming)
        _check_space(incoming, files)
        for number, remote in enumerate(files, 1):
            logger.info("%d/%d %s, %d bytes", number, len(files), remote.path, remote.size)
            _fetch(source, remote, incoming)
        incoming.rename(final)
        _sync_directory(into)
        return _size(final)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def wanted(files: list[RemoteFile]) -> list[RemoteFile]:
    """Weights, tokenizer and settings; not the same weights in other formats.

    Raises FetchError at a name that would leave the directory.
    """
    if len(files) > _LARGEST_COUNT:
        raise FetchError("ModelTooLarge", f"{len(files)} files are more than {_LARGEST_COUNT}")
    chosen = []
    for remote in files:
        path = PurePosixPath(remote.path)
        if path.is_absolute() or ".." in path.parts or "\\" in remote.path:
            raise FetchError("ModelCorrupt", f"the source names a file outside: {remote.path!r}")
        if path.suffix in _WANTED and not path.parts[0].startswith("."):
            chosen.append(remote)
    return chosen


def _named(source: Source, files: list[RemoteFile], incoming: Path) -> list[RemoteFile]:
    """Without weights that no worker reads: the same ones in one piece
    (`consolidated.safetensors`), an adapter, another model in a folder.

    Raises FetchError where some that one reads are missing.
    """
    by_path = {remote.path: remote for remote in files}
    named = {WEIGHTS}
    if WEIGHTS not in by_path and WEIGHTS_INDEX in by_path:
        _fetch(source, by_path[WEIGHTS_INDEX], incoming)
        try:
            named = set(weight_files(incoming))
        except ModelError as error:
            raise FetchError("ModelCorrupt", str(error).replace(f"{incoming}/", "")) from error
    if missing := sorted(named - by_path.keys()):
        index = "" if WEIGHTS_INDEX in by_path else f", and no {WEIGHTS_INDEX}"
        raise FetchError(
            "ModelNotFound",
            f"the source holds no {missing[0]}{index}: {_OTHER_SOURCE}",
        )
    return [
        remote
        for remote in files
        if remote.path in named or not remote.path.endswith(".safetensors")
    ]


def _check_config(
    source: Source, files: list[RemoteFile], incoming: Path, intended: Intended
) -> None:
    """Fetches `config.json` alone, and refuses what a worker would refuse once it has all.

    Raises FetchError.
    """
    by_path = {remote.path: remote for remote in files}
    for name in (CONFIG, TOKENIZER_JSON):
        if name not in by_path:
            raise FetchError("ModelNotFound", f"the source holds no {name}: {_OTHER_SOURCE}")
    _fetch(source, by_path[CONFIG], incoming)
    try:
        config = load_config(incoming)
    except ModelError as error:
        raise FetchError("ModelUnsupported", str(error).replace(f"{incoming}/", "")) from error
    try:
        check_fit(config, intended)
    except ModelError as error:
        raise FetchError(UNFIT, str(error)) from error


def _fetch(source: Source, remote: RemoteFile, incoming: Path) -> None:
    target = incoming / remote.path
    if target.exists() and target.stat().st_size == remote.size:
        return  # it got its name after its hash was checked
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures, corrupt = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if before < remote.size or remote.size == 0:
                _append(source, remote, part)
            if remote.matches(part):
                os.replace(part, target)
                return
            part.unlink()
            if corrupt:
                raise FetchError("ModelCorrupt", f"{remote.path} has the wrong hash, twice")
            corrupt = True
            logger.warning("%s has the wrong hash, once more", remote.path)
        except OSError as error:
            got = part.stat().st_size if part.exists() else 0
            failures = 0 if got > before else failures + 1
            if failures == _ATTEMPTS:
                raise FetchError("DownloadFailed", f"{remote.path}: {error}") from error
            logger.warning("%s: cut at %d of %d bytes: %s", remote.path, got, remote.size, error)
            time.sleep(min(0.2 * 2**failures, 20))


def _append(source: Source, remote: RemoteFile, part: Path) -> None:
    """Raises OSError when the transfer ends early; what came stays for the next try."""
    with part.open("ab") as out:
        offset = out.tell()
        if offset > remote.size:
            out.truncate(0)
            offset = 0
        for chunk in source.read(remote, offset):
            if out.tell() + len(chunk) > remote.size:
                raise FetchError("ModelCorrupt", f"{remote.path} is longer than announced")
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
        if out.tell() < remote.size:
            raise ConnectionError(f"ended after {out.tell()} bytes")


def _check_space(incoming: Path, files: list[RemoteFile]) -> None:
    missing = sum(
        remote.size
        for remote in files
        if not (incoming / remote.path).exists()
    )  # fmt: skip
    missing -= sum(part.stat().st_size for part in incoming.rglob("*.part"))
    free = shutil.disk_usage(incoming).free
    if missing > free:
        raise FetchError(
            "NoSpace",
            f"{missing / 2**30:.1f} GiB are to come, {free / 2**30:.1f} GiB are free: set "
            "model.cache.size, or let the claim grow if it exists",
        )


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[IO[bytes]]:
    """Two Jobs on one claim take turns; the second finds everything done.

    Raises FetchError when its turn does not come, as behind a lock that a lost node holds.
    """
    deadline = time.monotonic() + _TURN
    with (directory / ".lock").open("ab") as lock:
        while not _locked(lock):
            if time.monotonic() >= deadline:
                raise FetchError(
                    "CacheBusy",
                    f"another pod has filled the claim for {_TURN / 60:.0f} minutes: if it hangs, "
                    "delete it",
                )
            time.sleep(0.2)
        yield lock


def _locked(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _say(message: dict[str, str]) -> None:
    path = os.environ.get("RADIXGROVE_TERMINATION_LOG", "/dev/termination-log")
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(message)[:4000])


def _intended(given: argparse.Namespace) -> Intended | None:
    if given.tp is None:
        return None
    return Intended(
        tp=given.tp,
        pp=given.pp,
        ep=given.ep,
        dtype=given.dtype,
        quantize=given.quantize,
        max_model_len=given.max_model_len,
        memory=given.memory,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="radixgrove.operator.fetch")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("resolve", "download"):
        command = commands.add_parser(name)
        command.add_argument("--source", required=True)
        command.add_argument("--revision", default="", required=name == "download")
        if name == "download":
            command.add_argument("--into", type=Path, required=True)
            command.add_argument("--tp", type=int)
            command.add_argument("--pp", type=int, default=1)
            command.add_argument("--ep", type=int, default=1)
            command.add_argument("--dtype", default="")
            command.add_argument("--quantize", default="")
            command.add_argument("--max-model-len", type=int)
            command.add_argument("--memory", type=int, default=0)
    given = parser.parse_args(arguments)
    logs.configure("info", json=False)
    try:
        source = open_source(given.source, given.revision)
        if given.command == "resolve":
            revision = source.resolve()
            logger.info("%s is at %s", given.source, revision)
            _say({"revision": revision})
        else:
            size = download(source, given.into, _intended(given))
            _say({"revision": given.revision, "bytes": str(size)})
    except FetchError as failure:
        logger.error("%s: %s", failure.reason, failure.message)
        _say({"reason": failure.reason, "message": failure.message})
        return 1 if failure.reason in _PASSING else HOPELESS
    except OSError as error:
        logger.error("%s", error)
        _say({"reason": "DownloadFailed", "message": error.strerror or str(error)})
        return 1
    return 0
