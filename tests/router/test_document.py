"""What a router says that it serves, it serves."""

from __future__ import annotations

from openapi_spec_validator import validate

from tests.router.conftest import MakeRouter


async def test_documents_list_what_is_served_and_nothing_else(make_router: MakeRouter) -> None:
    router = await make_router(ready=False)
    for management, paths in (
        (
            False,
            {
                *("/livez", "/health", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"),
                *("/v1/chat/completions", "/v1/completions"),
            },
        ),
        (
            True,
            {
                *("/livez", "/health", "/readyz", "/status", "/log-level"),
                "/replicas/{replica_id}/drain",
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
