"""What a router says that it serves, it serves."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from openapi_spec_validator import validate

from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL


async def test_documents_list_what_is_served_and_nothing_else(make_router: MakeRouter) -> None:
    router = await make_router(ready=False)
    for management, paths in (
        (
            False,
            {
                *("/livez", "/health", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"),
                *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
            },
        ),
        (
            True,
            {
                *("/livez", "/health", "/readyz", "/status", "/log-level"),
                *("/replicas/{replica_id}/drain", "/replicas/{replica_id}/undrain"),
            },
        ),
    ):
        document = (await router.get("/openapi.json", management=management)).json
        validate(document)
        assert set(document["paths"]) == paths
        for path, methods in document["paths"].items():
            status = (await router.get(path, management=management)).status
            expected = {"/readyz": 503, "/v1/models/{model}": 404}.get(path, 200)
            assert status == (expected if "get" in methods else 405), path


async def test_web_pages_may_use_the_api_and_never_the_management_port(
    make_router: MakeRouter,
) -> None:
    router = await make_router(ready=False, cors_origins=["https://app.example"])
    for origin, management, allowed in (
        ("https://app.example", False, "https://app.example"),
        ("https://other.example", False, None),
        ("https://app.example", True, None),
    ):
        answer = await router.get("/livez", management=management, origin=origin)
        assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("examples", [3, pytest.param(15, marks=pytest.mark.slow)])
async def test_no_request_that_a_document_allows_or_forbids_is_a_failure(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter, examples: int
) -> None:
    from tests.drawn_requests import send_drawn_requests

    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    for management in (False, True):
        document = (await router.get("/openapi.json", management=management)).json
        url = f"http://127.0.0.1:{router.management_port if management else router.port}"
        # Bodies are the simulated replica's.
        send = partial(send_drawn_requests, url, document, MODEL, examples=examples)
        statuses = await asyncio.to_thread(send, check_bodies=management)
        assert statuses[200] >= examples
        assert statuses[400] >= examples
