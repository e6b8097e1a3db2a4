"""Where models come from: the Hugging Face hub's file API, S3, and Google Cloud Storage.

The hub's API: `GET /api/models/REPO/revision/REV` (commit), `GET /api/models/REPO/tree/COMMIT`
(files; `oid` is git's blob hash, `lfs.oid` the SHA-256 of large ones) and
`GET /REPO/resolve/COMMIT/PATH`.

Google's JSON API: `GET /storage/v1/b/BUCKET/o?prefix=` and
`GET /storage/v1/b/BUCKET/o/NAME?alt=media`, with the token that the metadata server gives the
pod's ServiceAccount, if there is one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import urllib3

from radixgrove.protocol.errors import PeerError

_CHUNK = 1 << 20
_TIMEOUT = urllib3.Timeout(connect=15.0, read=60.0)
_MAX_LISTING = 64 << 20  # bytes of one answer
_MAX_PAGES = 1000
_ASK_AGAIN = 5.0  # seconds between questions to a metadata server that does not answer


_ACCESS = (
    "set model.credentialsSecret, or pods.downloads.serviceAccountName to a ServiceAccount with "
    "workload identity"
)


_S3_REFUSES = {
    "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
    "403",
}  # fmt: skip


UNAUTHORIZED = "Unauthorized"
CHANGED = "ModelChanged"  # the revision that was looked up cannot be had any more


class FetchError(PeerError):
    """`reason` is a condition's reason; `message` tells a person what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class RemoteFile:
    """`algorithm`: sha256, md5, git (SHA-1 over git's blob header and content), or none."""

    path: str
    size: int
    algorithm: str = "none"
    digest: str = ""
    version: str = ""  # what the transfer must be of (ETag)

    def matches(self, path: Path) -> bool:
        """Whether a local file is this one."""
        if path.stat().st_size != self.size:
            return False
        if self.algorithm == "none":
            return True
        header = f"blob {self.size}\0".encode() if self.algorithm == "git" else b""
        digest = hashlib.new("sha1" if self.algorithm == "git" else self.algorithm, header)
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest() == self.digest


class Source(Protocol):
    """A model's files at one revision. Failures of the network are OSErrors."""

    def resolve(self) -> str: ...

    def files(self) -> list[RemoteFile]: ...

    def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]: ...


def open_source(source: str, revision: str) -> Source:
    """Raises FetchError for a scheme that is not fetched."""
    scheme, _, rest = source.partition("://")
    if scheme == "hf":
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        return HubSource(endpoint, rest, revision or "main", os.environ.get("HF_TOKEN", ""))
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        return S3Source(bucket, prefix, revision)
    if scheme == "gs":
        bucket, _, prefix = rest.partition("/")
        return GoogleSource(bucket, prefix, revision)
    raise FetchError("ModelNotFound", f"{scheme}:// is not fetched")


class HubSource:
    """A repository of the hub, or of anything that speaks its file API."""

    def __init__(self, endpoint: str, repository: str, revision: str, token: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._repository = urllib.parse.quote(repository)
        self._name = f"{repository} at {revision}"
        self._revision = urllib.parse.quote(revision, safe="")
        # urllib3 drops the authorization header when a redirect leads to another host.
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # The hub does not tell strangers which repositories there are.
        self._refused = f"the hub refuses {self._name}: " + (
            "model.source is misspelt, the token of model.tokenSecret is not valid, or its account "
            "has not accepted the model's terms"
            if token
            else "model.source is misspelt, or the model needs a token: set model.tokenSecret, and "
            "accept its terms with that account"
        )
        self._pool = _pool(self._endpoint)

    def resolve(self) -> str:
        answer, _ = self._json(f"/api/models/{self._repository}/revision/{self._revision}")
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not commit:
            raise FetchError(
                "ModelNotFound", f"the hub names no commit of {self._name}: see model.revision"
            )
        return commit

    def files(self) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        url = f"/api/models/{self._repository}/tree/{self._revision}?recursive=true"
        for _ in range(_MAX_PAGES):
            answer, following = self._json(url)
            entries = answer if isinstance(answer, list) else []
            found += [_hub_file(entry) for entry in entries if entry.get("type") == "file"]
            if not following:
                return found
            url = following
        raise FetchError("ModelTooLarge", "the hub's listing does not end")

    def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]:
        path = urllib.parse.quote(remote.path)
        headers = dict(self._headers)
        if offset:
            headers["Range"] = f"bytes={offset}-"
        url = f"{self._endpoint}/{self._repository}/resolve/{self._revision}/{path}"
        yield from _body(self._get(url, headers), offset)

    def _json(self, path: str) -> tuple[Any, str]:
        """An answer, and the path of its next page."""
        url = path if "://" in path else self._endpoint + path
        response = self._get(url, self._headers)
        with response:
            data = response.read(_MAX_LISTING + 1)
        if len(data) > _MAX_LISTING:
            raise FetchError("ModelTooLarge", "the hub's answer does not end")
        links = urllib.request.parse_http_list(response.headers.get("Link", ""))
        pages = [link.partition(">")[0].lstrip("<") for link in links if 'rel="next"' in link]
        following = pages[0] if pages else ""
        if following and not following.startswith(self._endpoint + "/"):
            raise FetchError("ModelCorrupt", "the hub's listing leads to another host")
        try:
            return json.loads(data), following
        except ValueError as error:
            raise OSError("the hub's answer is no JSON") from error

    def _get(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        return _get(
            self._pool, url, headers,
            hint="modelCache.hubEndpoint, pods.proxy and pods.caBundle",
            refused=self._refused,
            missing=f"the hub has no {self._name}: see model.source and model.revision",
        )  # fmt: skip


def _get(
    pool: urllib3.PoolManager,
    url: str,
    headers: dict[str, str],
    *,
    hint: str,
    refused: str,
    missing: str,
) -> urllib3.BaseHTTPResponse:
    """An answer, its body still to be read. `hint`: values of the chart that matter to reach it.

    Raises FetchError with `refused` or `missing`, and OSError for what may pass.
    """
    host = urllib.parse.urlsplit(url).hostname
    try:
        response = pool.request(
            "GET", url, headers=headers, preload_content=False, timeout=_TIMEOUT,
            retries=urllib3.Retry(connect=3, read=0, redirect=5, status=0, backoff_factor=0.5),
        )  # fmt: skip
    except urllib3.exceptions.HTTPError as error:
        why = type(getattr(error, "reason", error)).__name__  # behind "too many tries"
        raise ConnectionError(
            f"{host} is not reached ({why}): see {hint} among the chart's values, and "
            "NetworkPolicies of this namespace"
        ) from error
    if response.status < 300:
        return response
    response.release_conn()
    if response.status in (401, 403):
        raise FetchError(UNAUTHORIZED, refused)
    if response.status == 404:
        raise FetchError("ModelNotFound", missing)
    raise OSError(f"{host} answers {response.status}")


def _hub_file(entry: dict[str, Any]) -> RemoteFile:
    large = entry.get("lfs")
    if isinstance(large, dict):
        return RemoteFile(str(entry["path"]), int(large["size"]), "sha256", str(large["oid"]))
    return RemoteFile(str(entry["path"]), int(entry["size"]), "git", str(entry["oid"]))


def _body(response: urllib3.BaseHTTPResponse, offset: int) -> Iterator[bytes]:
    """The bytes from `offset` on, also from a server that ignores ranges."""
    skip = offset if response.status != 206 else 0
    with response:
        try:
            for chunk in response.stream(_CHUNK):
                if skip >= len(chunk):
                    skip -= len(chunk)
                    continue
                yield chunk[skip:]
                skip = 0
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(type(error).__name__) from error


def _pool(endpoint: str) -> urllib3.PoolManager:
    """Honours the environment's proxies and CA bundle."""
    parts = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(parts.scheme)
    bundle = os.environ.get("SSL_CERT_FILE")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy, ca_certs=bundle)
    return urllib3.PoolManager(ca_certs=bundle)


class S3Source:
    """All objects under a prefix. Its revision is the digest of their names, sizes and ETags."""

    def __init__(self, bucket: str, prefix: str, revision: str) -> None:
        import botocore.config
        import botocore.exceptions
        import botocore.session

        self._errors = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
        config = botocore.config.Config(
            connect_timeout=15, read_timeout=60, retries={"max_attempts": 3, "mode": "standard"}
        )
        region = os.environ.get("AWS_REGION", "us-east-1")
        session = botocore.session.get_session()
        self._client = session.create_client("s3", region_name=region, config=config)
        self._bucket = bucket
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        self._revision = revision

    def resolve(self) -> str:
        return _digest_of(self._list())

    def files(self) -> list[RemoteFile]:
        files = _unchanged(self._list(), self._revision)
        return [self._checkable(remote) for remote in files]

    def _checkable(self, remote: RemoteFile) -> RemoteFile:
        """The tag of an object under a KMS key looks like an MD5 and is none."""
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + remote.path)
        except self._errors as error:
            raise self._translated(error) from error
        if str(head.get("ServerSideEncryption", "")).startswith("aws:kms"):
            return replace(remote, algorithm="none")
        return remote

    def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]:
        arguments = {"Bucket": self._bucket, "Key": self._prefix + remote.path}
        if offset:
            arguments["Range"] = f"bytes={offset}-"
        try:
            answer = self._client.get_object(**arguments, IfMatch=f'"{remote.version}"')
            yield from answer["Body"].iter_chunks(_CHUNK)
        except self._errors as error:
            raise self._translated(error) from error
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(type(error).__name__) from error

    def _list(self) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    path = str(entry["Key"])[len(self._prefix) :]
                    tag = str(entry["ETag"]).strip('"')
                    # A single part's tag is its MD5, that of many parts is not.
                    plain = len(tag) == 32 and "-" not in tag
                    found.append(
                        RemoteFile(path, int(entry["Size"]), "md5" if plain else "none", tag, tag)
                    )
        except self._errors as error:
            raise self._translated(error) from error
        return _objects_of(found, f"s3://{self._bucket}/{self._prefix}")

    def _translated(self, error: Exception) -> Exception:
        response: dict[str, Any] = getattr(error, "response", {})
        code = str(response.get("Error", {}).get("Code", ""))
        where = f"s3://{self._bucket}/{self._prefix}"
        if code in ("NoSuchBucket", "NoSuchKey", "404"):
            return FetchError("ModelNotFound", f"{where} does not exist: see model.source")
        if code in _S3_REFUSES:
            said = f"{where} is refused ({code}): see model.credentialsSecret"
            return FetchError(UNAUTHORIZED, said)
        if type(error).__name__ == "NoCredentialsError":
            return FetchError(UNAUTHORIZED, f"no credentials for {where}: {_ACCESS}")
        return OSError(
            f"{where} is not read ({code or type(error).__name__}): see AWS_ENDPOINT_URL and "
            "AWS_REGION in model.credentialsSecret, pods.proxy and pods.caBundle among the chart's "
            "values, and NetworkPolicies of this namespace"
        )


class GoogleSource:
    """All objects under a prefix of a bucket. Its revision is the digest of their listing."""

    def __init__(self, bucket: str, prefix: str, revision: str) -> None:
        endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
        self._objects = f"{endpoint.rstrip('/')}/storage/v1/b/{urllib.parse.quote(bucket)}/o"
        self._where = f"gs://{bucket}/{prefix}"
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        self._revision = revision
        self._pool = _pool(endpoint)
        self._identity = _GoogleIdentity()

    def resolve(self) -> str:
        return _digest_of(self._list())

    def files(self) -> list[RemoteFile]:
        return _unchanged(self._list(), self._revision)

    def read(self, remote: RemoteFile, offset: int) -> Iterator[bytes]:
        name = urllib.parse.quote(self._prefix + remote.path, safe="")
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        url = f"{self._objects}/{name}?alt=media&generation={remote.version}"
        yield from _body(self._get(url, headers), offset)

    def _list(self) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        query = {
            "prefix": self._prefix,
            "fields": "items(name,size,md5Hash,generation),nextPageToken",
        }
        for _ in range(_MAX_PAGES):
            with self._get(f"{self._objects}?{urllib.parse.urlencode(query)}", {}) as response:
                data = response.read(_MAX_LISTING)
            try:
                answer = json.loads(data)
            except ValueError as error:
                raise OSError("the bucket's listing is no JSON") from error
            found += [self._file(entry) for entry in answer.get("items", [])]
            if "nextPageToken" not in answer:
                break
            query["pageToken"] = answer["nextPageToken"]
        else:
            raise FetchError("ModelTooLarge", "the bucket's listing does not end")
        return _objects_of(found, self._where)

    def _file(self, entry: dict[str, Any]) -> RemoteFile:
        """An object that was composed of others has no MD5."""
        digest = base64.b64decode(entry.get("md5Hash", "")).hex()
        return RemoteFile(
            path=str(entry["name"])[len(self._prefix) :],
            size=int(entry["size"]),
            algorithm="md5" if digest else "none",
            digest=digest,
            version=str(entry["generation"]),
        )

    def _get(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return _get(
                self._pool, url, headers | self._identity.headers(),
                hint="pods.proxy and pods.caBundle",
                refused=f"{self._where} is refused: set pods.downloads.serviceAccountName to a "
                "ServiceAccount with workload identity that may read it",
                missing=f"{self._where} does not exist: see model.source",
            )  # fmt: skip
        except FetchError as error:
            if error.reason != UNAUTHORIZED or not self._identity.unknown:
                raise
            words = "the node's metadata server, which has the pod's token, does not answer"
            raise OSError(f"{error.message}; {words}") from error


class _GoogleIdentity:
    """The pod's own account, as the node's metadata server knows it; none: public buckets only."""

    def __init__(self) -> None:
        self._token = ""
        self._none = False
        self._ends = 0.0  # monotonic, as `_due`
        self._due = 0.0  # when to ask, the first time or again

    @property
    def unknown(self) -> bool:
        """Whether the server has yet to answer, which it may not do in a pod's first seconds."""
        return not self._none and time.monotonic() >= self._ends

    def headers(self) -> dict[str, str]:
        """Asks shortly before a token ends, which is sent as long as there is no other."""
        if not self._none and time.monotonic() >= self._due:
            self._ask()
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _ask(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        self._due = time.monotonic() + _ASK_AGAIN
        try:
            answer = urllib3.PoolManager().request(
                "GET", url, headers={"Metadata-Flavor": "Google"}, timeout=3.0, retries=False
            )
            found = answer.json() if answer.status == 200 else {}
        except urllib3.exceptions.NameResolutionError as error:
            passing = getattr(error.__cause__, "errno", None) == socket.EAI_AGAIN
            self._none = not (self._token or passing)  # elsewhere than at Google
            return
        except (urllib3.exceptions.HTTPError, ValueError):
            return
        if token := str(found.get("access_token", "")):
            self._token = token
            self._ends = time.monotonic() + float(found.get("expires_in", 0))
            self._due = self._ends - 60.0
        elif answer.status == 404:
            self._none = not self._token


def _unchanged(files: list[RemoteFile], revision: str) -> list[RemoteFile]:
    """Raises FetchError when they are others than those that were looked up."""
    if revision and _digest_of(files) != revision:
        raise FetchError(CHANGED, "the bucket's objects changed since they were looked up")
    return files


def _objects_of(found: list[RemoteFile], where: str) -> list[RemoteFile]:
    """Without the markers of folders. Raises FetchError when nothing is there."""
    if not found:
        raise FetchError("ModelNotFound", f"{where} holds nothing: see model.source")
    return [remote for remote in found if remote.path and not remote.path.endswith("/")]


def _digest_of(files: list[RemoteFile]) -> str:
    lines = sorted(f"{remote.path}\0{remote.size}\0{remote.version}\n" for remote in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]
