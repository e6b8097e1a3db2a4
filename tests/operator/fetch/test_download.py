"""Fetching models: from a small hub that cuts, corrupts and redirects, and from S3 (moto)."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import urllib3
from moto.server import ThreadedMotoServer

from radixgrove.operator.fetch import download
from radixgrove.operator.fetch.sources import FetchError, RemoteFile
from tests.conftest import STOP_SECONDS, find_free_port
from tests.hub import COMMIT, Hub

WEIGHTS = bytes(range(256)) * 40_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model-00001-of-00001.safetensors": WEIGHTS,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    ).encode(),
    "tokenizer.json": b"{}",
    "tokenizer/tokenizer.json": b"{}",
    "pytorch_model.bin": b"the same weights again",
    "consolidated.safetensors": b"and again, in one piece",
    "original/model.safetensors": b"and again, elsewhere",
    "README.md": b"read me",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(FILES) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("RADIXGROVE_TERMINATION_LOG", str(path))
    return path


def run(
    into: Path, source: str = "hf://org/model", revision: str = COMMIT, fit: Sequence[str] = ()
) -> int:
    return download.main(
        ["download", "--source", source, "--revision", revision, "--into", str(into), *fit]
    )


def fetched(into: Path) -> dict[str, bytes]:
    root = into / download.SNAPSHOT
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


UNWANTED = {
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/model.safetensors",
    "README.md",
}
WANTED = {name: content for name, content in FILES.items() if name not in UNWANTED}


def test_a_branch_is_resolved_to_its_commit(hub: Hub, said: Path) -> None:
    assert download.main(["resolve", "--source", "hf://org/model"]) == 0
    assert json.loads(said.read_text()) == {"revision": COMMIT}


def test_what_serving_needs_is_fetched_and_nothing_else(
    hub: Hub, said: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "m") == 0
    assert fetched(tmp_path / "m") == WANTED


@pytest.mark.parametrize(
    ("changed", "fit", "reason", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, (), "ModelUnsupported", "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, (), "ModelUnsupported", "'awq' is not"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ("--quantize", "fp8"),
            "ModelDoesNotFit",
            "set quantize to none",
        ),
        ({"hidden_size": None}, (), "ModelUnsupported", "config.json: hidden_size"),
        ({}, ("--tp", "4"), "ModelDoesNotFit", "tp 4 does not divide"),
        ({}, ("--pp", "9"), "ModelDoesNotFit", "pp 9 exceeds the model's"),
        ({}, ("--ep", "2"), "ModelDoesNotFit", "ep 2 is for models with experts"),
        ({}, ("--max-model-len", "4096"), "ModelDoesNotFit", "exceeds the model's 2048"),
        ({}, ("--memory", "1000"), "ModelDoesNotFit", "the weights take"),
        ({}, ("--dtype", "bfloat16", "--memory", "1000"), "ModelDoesNotFit", "in bfloat16"),
    ],
    ids=str,
)
def test_no_weights_are_fetched_for_a_model_that_could_not_run(
    hub: Hub, said: Path, tmp_path: Path,
    changed: dict[str, Any], fit: tuple[str, ...], reason: str, named: str,
) -> None:  # fmt: skip
    hub.files["config.json"] = json.dumps(CONFIG | changed).encode()
    assert run(tmp_path / "m", fit=("--tp", "2", *fit)) == download.HOPELESS
    written = json.loads(said.read_text())
    assert written["reason"] == reason
    assert named in written["message"]
    assert str(tmp_path) not in written["message"]
    assert [name for name, _ in hub.requests] == ["config.json"]


def test_a_model_that_fits_is_fetched_and_its_config_once(
    hub: Hub, said: Path, tmp_path: Path
) -> None:
    fit = ("--tp", "2", "--max-model-len", "2048", "--memory", str(1 << 30))
    assert run(tmp_path / "m", fit=fit) == 0
    assert fetched(tmp_path / "m") == WANTED
    assert [name for name, _ in hub.requests].count("config.json") == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_source_without_what_a_worker_reads_first_is_refused(
    hub: Hub, said: Path, tmp_path: Path, name: str
) -> None:
    del hub.files[name]
    assert run(tmp_path / "m", fit=("--tp", "1")) == download.HOPELESS
    written = json.loads(said.read_text())
    assert written["reason"] == "ModelNotFound"
    assert written["message"].startswith(f"the source holds no {name}: name one in model.source")


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
    assert run(tmp_path / "m") == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelCorrupt"
    assert not (tmp_path / "m" / download.SNAPSHOT).exists()
    weights = [name for name, _ in hub.requests if name.endswith("safetensors")]
    assert len(weights) <= 2, "810 GB are not fetched again and again"


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


def test_how_large_it_is_is_said_also_by_whoever_finds_it_there(
    hub: Hub, said: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert run(tmp_path / "m") == 0
        size = sum(len(FILES[name]) for name in WANTED)
        assert json.loads(said.read_text())["bytes"] == str(size)


def test_whoever_waits_too_long_for_its_turn_says_so(
    hub: Hub, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_TURN", 0.3)
    (tmp_path / "m").mkdir()
    with download._alone(tmp_path / "m"):
        assert run(tmp_path / "m") == 1
    assert json.loads(said.read_text())["reason"] == "CacheBusy"
    assert run(tmp_path / "m") == 0


def test_a_hub_that_cannot_be_reached_is_named(
    said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.setattr(urllib3.Retry, "get_backoff_time", lambda _: 0.0)
    assert download.main(["resolve", "--source", "hf://org/model"]) == 1
    message = json.loads(said.read_text())
    assert message["reason"] == "DownloadFailed"
    assert "127.0.0.1 is not reached (NewConnectionError)" in message["message"]
    assert "modelCache.hubEndpoint" in message["message"]


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
        (lambda hub: hub.files.pop("model.safetensors.index.json"), "ModelNotFound"),
        (lambda hub: hub.files.update({"model.safetensors.index.json": b"{}"}), "ModelCorrupt"),
        (lambda hub: hub.files.update({"../../evil.json": b"x"}), "ModelCorrupt"),
    ],
)
def test_failures_are_named_for_the_condition(
    hub: Hub, said: Path, tmp_path: Path, prepare: Any, reason: str
) -> None:
    prepare(hub)
    assert run(tmp_path / "m") == download.HOPELESS, "the Job gives up at once"
    assert json.loads(said.read_text())["reason"] == reason


def test_one_file_of_weights_needs_no_index(hub: Hub, said: Path, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = hub.files.pop("model-00001-of-00001.safetensors")
    assert run(tmp_path / "m") == 0
    weights = {name for name in fetched(tmp_path / "m") if name.endswith(".safetensors")}
    assert weights == {"model.safetensors"}


def test_the_token_is_used(
    hub: Hub, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run(tmp_path / "m") == 0


def test_the_hub_keeps_from_strangers_whether_there_is_such_a_repository(
    hub: Hub, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    assert run(tmp_path / "m") == download.HOPELESS
    message = json.loads(said.read_text())["message"]
    assert "model.source is misspelt, or the model needs a token: set model.tokenSecret" in message
    monkeypatch.setenv("HF_TOKEN", "of yesterday")
    assert run(tmp_path / "m") == download.HOPELESS
    assert "the token of model.tokenSecret is not valid" in json.loads(said.read_text())["message"]


def test_an_unknown_repository_is_not_found(hub: Hub, said: Path) -> None:
    assert download.main(["resolve", "--source", "hf://org/other"]) == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelNotFound"


def test_more_than_the_disk_holds_is_refused_first(tmp_path: Path) -> None:
    class Huge:
        def resolve(self) -> str:
            return "r"

        def files(self) -> list[RemoteFile]:
            return [RemoteFile("model.safetensors", 1 << 60)]

        def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]:
            raise AssertionError("nothing is transferred")

    with pytest.raises(FetchError) as refused:
        download.download(Huge(), tmp_path / "m")
    assert refused.value.reason == "NoSpace"


# ---- Google Cloud Storage ------------------------------------------------------------------------


class Bucket:
    """Speaks as much of Google's JSON API, and of the metadata server, as a download needs."""

    def __init__(self) -> None:
        self.files = {f"llama/{name}": content for name, content in FILES.items()}
        self.token = ""  # that it asks for
        self.given: dict[str, Any] = {}  # by the metadata server
        self.silent = range(0)  # which of the questions to that come to nothing
        self.questions = 0
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                bucket.answer(self)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=[STOP_SECONDS], daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path.startswith("/computeMetadata/"):
            known = bool(self.given) and request.headers["Metadata-Flavor"] == "Google"
            status = 503 if self.questions in self.silent else 200 if known else 404
            self.questions += 1
            self._send(request, status, json.dumps(self.given).encode())
        elif self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(request, 401, b"")
        elif parts.path == "/storage/v1/b/models/o":
            self._send(request, 200, json.dumps(self._listing(query)).encode())
        else:
            name = urllib.parse.unquote(parts.path.rpartition("/")[2])
            start = int(request.headers.get("Range", "bytes=0-")[6:-1])
            status = 206 if "Range" in request.headers else 200
            self._send(request, status, self.files[name][start:])

    def _listing(self, query: dict[str, str]) -> dict[str, Any]:
        """Two pages."""
        names = sorted(name for name in self.files if name.startswith(query["prefix"]))
        page, rest = (names[3:], []) if "pageToken" in query else (names[:3], names[3:])
        items = [
            {
                "name": name,
                "size": str(len(self.files[name])),
                "md5Hash": base64.b64encode(hashlib.md5(self.files[name]).digest()).decode(),
                "generation": str(zlib.crc32(self.files[name])),
            }
            for name in page
        ]
        return {"items": items} | ({"nextPageToken": "2"} if rest else {})

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    bucket = Bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{bucket.address}")
    monkeypatch.setenv("GCE_METADATA_HOST", bucket.address)
    yield bucket
    bucket.server.shutdown()
    bucket.server.server_close()


def resolved(said: Path, source: str) -> str:
    assert download.main(["resolve", "--source", source]) == 0
    return str(json.loads(said.read_text())["revision"])


@pytest.mark.parametrize("token", ["", "of the pod's account"])
def test_a_google_bucket_is_resolved_and_fetched(
    google: Bucket, said: Path, tmp_path: Path, token: str
) -> None:
    google.token = token
    google.given = {"access_token": token, "expires_in": 3600} if token else {}
    revision = resolved(said, "gs://models/llama")
    incoming = tmp_path / "m/incoming"
    incoming.mkdir(parents=True)
    (incoming / "model-00001-of-00001.safetensors.part").write_bytes(WEIGHTS[:5000])
    assert run(tmp_path / "m", "gs://models/llama", revision, fit=("--tp", "2")) == 0
    assert fetched(tmp_path / "m") == WANTED


def test_a_google_bucket_that_changed_or_refuses_is_named(
    google: Bucket, said: Path, tmp_path: Path
) -> None:
    revision = resolved(said, "gs://models/llama")
    google.files["llama/config.json"] = b"{}"
    assert run(tmp_path / "m", "gs://models/llama", revision) == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelChanged"
    assert download.main(["resolve", "--source", "gs://models/nothing"]) == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelNotFound"
    google.token = "another"
    assert download.main(["resolve", "--source", "gs://models/llama"]) == download.HOPELESS
    written = json.loads(said.read_text())
    assert written["reason"] == "Unauthorized"
    assert "pods.downloads.serviceAccountName" in written["message"]


def test_a_metadata_server_that_does_not_answer_yet_is_asked_again(
    google: Bucket, said: Path
) -> None:
    """As in a pod's first seconds: the Job's next pod has the token."""
    google.token, google.silent = "of the pod's account", range(1)
    google.given = {"access_token": google.token, "expires_in": 3600}
    assert download.main(["resolve", "--source", "gs://models/llama"]) == 1
    assert "does not answer" in json.loads(said.read_text())["message"]
    assert resolved(said, "gs://models/llama")


def test_a_token_that_cannot_be_renewed_now_serves_to_its_end(google: Bucket, said: Path) -> None:
    google.token, google.silent = "of the pod's account", range(1, 100)
    google.given = {"access_token": google.token, "expires_in": 59}
    assert resolved(said, "gs://models/llama")
    assert google.questions > 1


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
    assert download.main(["resolve", "--source", "s3://models/llama"]) == 0
    revision = json.loads(said.read_text())["revision"]
    assert run(tmp_path / "m", "s3://models/llama", revision) == 0
    assert fetched(tmp_path / "m") == WANTED


def test_a_part_of_an_object_is_resumed_and_checked(
    bucket: Any, said: Path, tmp_path: Path
) -> None:
    incoming = tmp_path / "m/incoming"
    incoming.mkdir(parents=True)
    (incoming / "model-00001-of-00001.safetensors.part").write_bytes(b"wrong" * 1000)
    download.main(["resolve", "--source", "s3://models/llama"])
    revision = json.loads(said.read_text())["revision"]
    assert run(tmp_path / "m", "s3://models/llama", revision) == 0
    assert fetched(tmp_path / "m") == WANTED


def test_objects_that_changed_since_are_noticed(bucket: Any, said: Path, tmp_path: Path) -> None:
    download.main(["resolve", "--source", "s3://models/llama"])
    revision = json.loads(said.read_text())["revision"]
    bucket.put_object(Bucket="models", Key="llama/config.json", Body=b"other")
    assert run(tmp_path / "m", "s3://models/llama", revision) == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelChanged"


def test_a_bucket_without_credentials_names_both_ways_to_give_them(
    bucket: Any, said: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert download.main(["resolve", "--source", "s3://models/llama"]) == download.HOPELESS
    message = json.loads(said.read_text())["message"]
    assert "model.credentialsSecret" in message
    assert "pods.downloads.serviceAccountName" in message


def test_a_bucket_that_cannot_be_reached_names_what_leads_to_it(
    bucket: Any, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    assert download.main(["resolve", "--source", "s3://models/llama"]) == 1
    written = json.loads(said.read_text())
    assert written["reason"] == "DownloadFailed"
    assert "s3://models/llama/ is not read (EndpointConnectionError)" in written["message"]
    assert "AWS_ENDPOINT_URL" in written["message"]


def test_an_empty_prefix_is_not_found(bucket: Any, said: Path) -> None:
    assert download.main(["resolve", "--source", "s3://models/nothing"]) == download.HOPELESS
    assert json.loads(said.read_text())["reason"] == "ModelNotFound"
