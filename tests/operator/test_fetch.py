"""Fetching models: from a small hub that cuts, corrupts and redirects, and from S3 (moto)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from radixgrove.operator import fetch
from radixgrove.operator.sources import Failure, RemoteFile

COMMIT = "c0ffee" * 6 + "beef"
WEIGHTS = bytes(range(256)) * 40_000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00001.safetensors": WEIGHTS,
    "tokenizer/tokenizer.json": b"{}",
    "pytorch_model.bin": b"the same weights again",
    "README.md": b"read me",
}


class Hub:
    """Speaks the hub's file API for one repository; `requests` are (path, range) of files."""

    def __init__(self) -> None:
        self.token = ""
        self.cut_after: int | None = None  # bytes of the first transfer of the weights
        self.corrupt = 0  # transfers of the weights that are wrong
        self.files = dict(FILES)
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            request.send_error(401)
        elif path == "/api/models/org/model/revision/main":
            self._json(request, {"sha": COMMIT})
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            self._tree(request)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._file(request, path.split("/", 5)[5])
        else:
            request.send_error(404)

    def _tree(self, request: BaseHTTPRequestHandler) -> None:
        """Two pages, as of a large repository."""
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "tokenizer", "oid": "x"}]
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": name, "size": len(content), "oid": blob}
            if len(content) > 1000:
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(content)}
            entries.append(entry)
        if "page=2" in request.path:
            self._json(request, entries[3:])
        else:
            link = f'<{self.url}{request.path}&page=2>; rel="next"'
            self._json(request, entries[:3], {"Link": link})

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        content = self.files[name]
        wanted = request.headers.get("Range", "")
        self.requests.append((name, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        body = content[start:]
        if content is WEIGHTS and self.corrupt:
            self.corrupt -= 1
            body = b"\xff" * len(body)
        request.send_response(206 if wanted else 200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if content is WEIGHTS and self.cut_after is not None:
            body, self.cut_after = body[: self.cut_after], None
            request.close_connection = True
        request.wfile.write(body)

    def _json(
        self, request: BaseHTTPRequestHandler, value: Any, headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            request.send_header(name, text)
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("RADIXGROVE_TERMINATION_LOG", str(path))
    return path


def run(into: Path, source: str = "hf://org/model", revision: str = COMMIT) -> int:
    return fetch.main(["download", "--source", source, "--revision", revision, "--into", str(into)])


def fetched(into: Path) -> dict[str, bytes]:
    root = into / fetch.SNAPSHOT
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


WANTED = {name: FILES[name] for name in FILES if not name.endswith((".bin", ".md"))}


def test_a_branch_is_resolved_to_its_commit(hub: Hub, said: Path) -> None:
    assert fetch.main(["resolve", "--source", "hf://org/model"]) == 0
    assert json.loads(said.read_text()) == {"revision": COMMIT}


def test_what_serving_needs_is_fetched_and_nothing_else(
    hub: Hub, said: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "m") == 0
    assert fetched(tmp_path / "m") == WANTED


def test_a_cut_file_is_resumed_where_it_ended(hub: Hub, said: Path, tmp_path: Path) -> None:
    hub.cut_after = 3_000_000
    assert run(tmp_path / "m") == 0
    assert fetched(tmp_path / "m") == WANTED
    ranges = [wanted for name, wanted in hub.requests if name.endswith("safetensors")]
    assert len(ranges) == 2
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 3_000_000


def test_a_corrupt_file_is_fetched_again(hub: Hub, said: Path, tmp_path: Path) -> None:
    hub.corrupt = 1
    assert run(tmp_path / "m") == 0
    assert fetched(tmp_path / "m") == WANTED


def test_a_file_that_stays_corrupt_is_an_error_and_leaves_no_snapshot(
    hub: Hub, said: Path, tmp_path: Path
) -> None:
    hub.corrupt = 100
    assert run(tmp_path / "m") == 1
    assert json.loads(said.read_text())["reason"] == "ModelCorrupt"
    assert not (tmp_path / "m" / fetch.SNAPSHOT).exists()


def test_a_killed_job_goes_on_where_it_was(hub: Hub, said: Path, tmp_path: Path) -> None:
    incoming = tmp_path / "m/incoming"
    incoming.mkdir(parents=True)
    (incoming / "config.json").write_bytes(FILES["config.json"])
    (incoming / "model-00001-of-00001.safetensors.part").write_bytes(WEIGHTS[:5000])
    assert run(tmp_path / "m") == 0
    assert fetched(tmp_path / "m") == WANTED
    assert ("model-00001-of-00001.safetensors", "bytes=5000-") in hub.requests
    assert "config.json" not in [name for name, _ in hub.requests]


def test_a_second_service_downloads_nothing(hub: Hub, said: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "m") == 0
    hub.requests.clear()
    assert run(tmp_path / "m") == 0
    assert hub.requests == []


def test_two_jobs_on_one_claim_download_once(hub: Hub, said: Path, tmp_path: Path) -> None:
    jobs = [threading.Thread(target=run, args=(tmp_path / "m",)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert fetched(tmp_path / "m") == WANTED
    names = [name for name, _ in hub.requests]
    assert sorted(names) == sorted(WANTED)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda hub: setattr(hub, "token", "secret"), "Unauthorized"),
        (lambda hub: hub.files.pop("model-00001-of-00001.safetensors"), "ModelNotFound"),
        (lambda hub: hub.files.update({"../../evil.json": b"x"}), "ModelCorrupt"),
    ],
)
def test_failures_are_named_for_the_condition(
    hub: Hub, said: Path, tmp_path: Path, prepare: Any, reason: str
) -> None:
    prepare(hub)
    assert run(tmp_path / "m") == 1
    assert json.loads(said.read_text())["reason"] == reason


def test_the_token_is_used(
    hub: Hub, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run(tmp_path / "m") == 0


def test_an_unknown_repository_is_not_found(hub: Hub, said: Path) -> None:
    assert fetch.main(["resolve", "--source", "hf://org/other"]) == 1
    assert json.loads(said.read_text())["reason"] == "ModelNotFound"


def test_more_than_the_disk_holds_is_refused_first(tmp_path: Path) -> None:
    class Huge:
        def resolve(self) -> str:
            return "r"

        def files(self) -> list[RemoteFile]:
            return [RemoteFile("model.safetensors", 1 << 60)]

        def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]:
            raise AssertionError("nothing is transferred")

    with pytest.raises(Failure) as refused:
        fetch.download(Huge(), tmp_path / "m")
    assert refused.value.reason == "NoSpace"


# ---- S3 ------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for name, content in FILES.items():
        client.put_object(Bucket="models", Key=f"llama/{name}", Body=content)
    yield client
    server.stop()


def test_a_bucket_is_resolved_and_fetched(bucket: Any, said: Path, tmp_path: Path) -> None:
    assert fetch.main(["resolve", "--source", "s3://models/llama"]) == 0
    revision = json.loads(said.read_text())["revision"]
    assert run(tmp_path / "m", "s3://models/llama", revision) == 0
    assert fetched(tmp_path / "m") == WANTED


def test_a_part_of_an_object_is_resumed_and_checked(
    bucket: Any, said: Path, tmp_path: Path
) -> None:
    incoming = tmp_path / "m/incoming"
    incoming.mkdir(parents=True)
    (incoming / "model-00001-of-00001.safetensors.part").write_bytes(b"wrong" * 1000)
    fetch.main(["resolve", "--source", "s3://models/llama"])
    revision = json.loads(said.read_text())["revision"]
    assert run(tmp_path / "m", "s3://models/llama", revision) == 0
    assert fetched(tmp_path / "m") == WANTED


def test_objects_that_changed_since_are_noticed(bucket: Any, said: Path, tmp_path: Path) -> None:
    fetch.main(["resolve", "--source", "s3://models/llama"])
    revision = json.loads(said.read_text())["revision"]
    bucket.put_object(Bucket="models", Key="llama/config.json", Body=b"other")
    assert run(tmp_path / "m", "s3://models/llama", revision) == 1
    assert json.loads(said.read_text())["reason"] == "ModelChanged"


def test_an_empty_prefix_is_not_found(bucket: Any, said: Path) -> None:
    assert fetch.main(["resolve", "--source", "s3://models/nothing"]) == 1
    assert json.loads(said.read_text())["reason"] == "ModelNotFound"
