"""A service's own router, as a process with the very environment that the operator renders."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from radixgrove.operator.api.spec import Router
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.render.router import router_objects
from radixgrove.protocol.model_table import SHARED, ModelEntry
from radixgrove.service.redis_client import connect
from tests.conftest import RedisServer, find_free_port
from tests.operator.operator_builders import CONFIG, SERVICE
from tests.router.harness import INTERNAL_KEY, SimulatedReplica, completion, eventually, prompt

SECRET = "cluster-secret"
REPLICA = "llama-0-a1-0"
WANTED = Router.model_validate(
    {
        "dedicated": True,
        "policy": "random",
        "auth": {"keysSecret": "llama-keys"},
        "settings": {"max_body_bytes": 4096},
    }
)


@pytest.fixture
def container(redis_server: RedisServer, tmp_path: Path) -> Iterator[str]:
    """The URL of the router, started as its container would be."""
    pod = router_objects(SERVICE, WANTED, CONFIG, "")[0]["spec"]["template"]["spec"]
    (spec,) = pod["containers"]
    (keys,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    assert keys["secret"]["secretName"] == "llama-keys"
    files = next(m["mountPath"] for m in spec["volumeMounts"] if m["name"] == "keys")
    (tmp_path / "api-keys").write_text("alice: her-key\n")
    installation = {
        "internal-key": INTERNAL_KEY,
        "cluster-secret": SECRET,
        "management-key": "management-key",
        "redis-url": f"redis://127.0.0.1:{redis_server.port}/0",
    }
    environment = {"PATH": os.environ["PATH"], "POD_NAME": "llama-router-x"}
    for item in spec["env"]:
        reference = item.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            assert reference["name"] == CONFIG.keys_secret
            if reference["key"] in installation or not reference.get("optional"):
                environment[item["name"]] = installation[reference["key"]]
        elif "value" in item:
            value = item["value"].replace("$(POD_NAME)", environment["POD_NAME"])
            environment[item["name"]] = value.replace(files, str(tmp_path))
    # What only a container has to itself.
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path)}
    port = find_free_port()
    environment |= {
        "RADIXGROVE_PORT": str(port), "RADIXGROVE_MANAGEMENT_PORT": str(find_free_port()),
    }  # fmt: skip
    program, *arguments = spec["args"]
    assert program == "radixgrove"
    process = subprocess.Popen(
        [sys.executable, "-m", "radixgrove.cli", *arguments], env=environment
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


@contextlib.asynccontextmanager
async def replica(server: RedisServer) -> AsyncIterator[SimulatedReplica]:
    running = SimulatedReplica(
        redis_url=f"redis://127.0.0.1:{server.port}/0", replica_id=REPLICA, service=SERVICE.key,
        models=["llama"], secret=SECRET.encode(),
    )  # fmt: skip
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def test_it_serves_its_own_model_to_those_with_a_key_and_no_other_service(
    container: str, redis_server: RedisServer
) -> None:
    table = RedisStore(
        connect(f"redis://127.0.0.1:{redis_server.port}/0", 2.0), CONFIG.redis.prefix
    )
    entry = ModelEntry(service=SERVICE.key, names=["llama"], attempts=[REPLICA], desired=1)
    table.put(SERVICE.key, 1.0, entry)
    table.put(SHARED, 1.0, ModelEntry(service="b.other", names=["other"], attempts=[], desired=1))

    async with replica(redis_server), aiohttp.ClientSession() as session:

        async def ask(key: str | None, **fields: str) -> int:
            body = completion(prompt(1), model="llama") | fields
            headers = {"authorization": f"Bearer {key}"} if key else {}
            url = f"{container}/v1/completions"
            async with session.post(url, json=body, headers=headers) as response:
                return response.status

        async def serves() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{container}/readyz") as response:
                    return response.status == 200
            return False

        await eventually(serves, deadline=60, what="the router has its replica")
        assert await ask("her-key") == 200
        assert await ask("her-key", user="x" * 4096) == 413, "as its settings say"
        assert await ask(None) == 401
        assert await ask("another") == 401
        headers = {"authorization": "Bearer her-key"}
        async with session.get(f"{container}/v1/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["llama"]
