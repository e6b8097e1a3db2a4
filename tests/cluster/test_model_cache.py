"""Models are downloaded once, by a Job of the cluster, from a hub that misbehaves and from S3."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from safetensors import safe_open
from safetensors.numpy import save

from radixgrove.worker.agent import demo_model
from tests.cluster.harness import demo, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served, reason
from tests.cluster.harness.traffic import Client
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until
from tests.hub import COMMIT, Hub

pytestmark = pytest.mark.cluster

ENGINE = {"contextLength": 256, "kvTokens": 1024, "maxRunning": 1, "settings": {"cpu_threads": 1}}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CORNER = {576: 64, 1536: 128, 192: 32}  # the demo model's sizes, and those of that shape
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A model of the demo model's kind and tokenizer, but small: 13 MB, a corner of its weights."""
    original = demo_model.ensure()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    small = {name: (original / name).read_bytes() for name in names}
    config = json.loads((original / "config.json").read_text()) | SHAPE
    small["config.json"] = json.dumps(config).encode()
    weights = {}
    with safe_open(original / "model.safetensors", "numpy") as whole:
        for name in whole.keys():  # noqa: SIM118 (it is no mapping)
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) < SHAPE["num_hidden_layers"]:
                tensor = whole.get_slice(name)
                corner = tuple(slice(CORNER.get(size, size)) for size in tensor.get_shape())
                weights[name] = np.ascontiguousarray(tensor[corner])
    small["model.safetensors"] = save(weights)
    return small


@pytest.fixture
def hub(cluster: Cluster, release_images: None, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A hub on this machine that pods reach, as the release's endpoint."""
    with Hub(files, host=cluster.addresses.bridge) as running:
        release.install(cluster, {"modelCache": {"hubEndpoint": running.url, "size": "1Gi"}})
        yield running
    release.install(cluster)


@pytest.fixture(scope="module")
def volumes(cluster: Cluster) -> None:
    cluster.offer_volumes(2)


def spec_of(mounts: Mounts, source: str, **model: Any) -> dict[str, Any]:
    return demo.spec(mounts, 1, engine=ENGINE) | {"model": {"source": source, **model}}


def claim_of(served: Served) -> str:
    return str(served.status()["model"]["claim"])


def owners(cluster: Cluster, claim: str) -> set[str]:
    """The services that a claim belongs to; of one that is gone, none."""
    found = cluster.kubectl.get("pvc", claim, "-n", demo.NAMESPACE) or {"metadata": {}}
    return {owner["name"] for owner in found["metadata"].get("ownerReferences", [])}


def test_two_services_share_one_download_that_is_cut_and_once_corrupt(
    cluster: Cluster, hub: Hub, volumes: None, worker_mounts: Mounts, client: Client
) -> None:
    hub.cut_after, hub.corrupt = 3_000_000, 1
    services = [Served(cluster.kubectl, demo.NAMESPACE, name) for name in ("first", "second")]
    for service in services:
        service.apply(spec_of(worker_mounts, "hf://org/model"))
    try:
        for service in services:
            status = service.wait_until_ready(1)
            assert reason(status, "ModelCached") == "True/Cached"
            assert status["model"]["revision"] == COMMIT
            # An error raises; such a model may well have nothing to say.
            client.ask(status["url"], service.name, "Say anything.")

        small = [name for name, _ in hub.requests if name != "model.safetensors"]
        assert len(small) == len(set(small))
        # Cut, then resumed; that was corrupt, then whole.
        ranges = [wanted for name, wanted in hub.requests if name == "model.safetensors"]
        assert [bool(wanted) for wanted in ranges] == [False, True, False]
        claim = claim_of(services[0])
        assert claim_of(services[1]) == claim
        wait_until(lambda: owners(cluster, claim) == {"first", "second"}, "both own the claim")
        services[0].delete()
        wait_until(lambda: owners(cluster, claim) == {"second"}, "the claim stays for the second")
    finally:
        for service in services:
            service.delete()
    wait_until(
        lambda: cluster.kubectl.get("pvc", claim, "-n", demo.NAMESPACE) is None,
        "the claim leaves with its last user",
    )


@pytest.fixture
def bucket(cluster: Cluster, files: Mapping[str, bytes]) -> Iterator[str]:
    """The URL of an S3 server that pods reach, with the model below s3://models/small."""
    server = ThreadedMotoServer(cluster.addresses.bridge, 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    s3 = boto3.client(
        "s3", region_name="us-east-1", endpoint_url=url,
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip
    s3.create_bucket(Bucket="models")
    for name, content in files.items():
        s3.put_object(Bucket="models", Key=f"small/{name}", Body=content)
    yield url
    server.stop()


def test_a_model_of_a_bucket_is_served(
    installed: Cluster, bucket: str, volumes: None, worker_mounts: Mounts, client: Client
) -> None:
    kubectl = installed.kubectl
    data = {**CREDENTIALS, "AWS_ENDPOINT_URL": bucket}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "bucket"},
            "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
        },
        namespace=demo.NAMESPACE,
    )
    served = Served(kubectl, demo.NAMESPACE, "bucketed")
    served.apply(
        spec_of(
            worker_mounts, "s3://models/small", credentialsSecret="bucket", cache={"size": "1Gi"}
        )
    )
    try:
        status = served.wait_until_ready(1)
        # An error raises; such a model may well have nothing to say.
        client.ask(status["url"], served.name, "Say anything.")
        assert "secret" not in json.dumps(served.read())
    finally:
        served.delete()
