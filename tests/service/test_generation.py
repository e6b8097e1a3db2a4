"""The document of the endpoints that generate says what their parsers do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from radixgrove.protocol.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.service import asgi, generation
from radixgrove.service.api import Api
from radixgrove.service.asgi import Receive, Scope, Send

LIMITS = ModelLimits(max_model_len=1000, vocab_size=100)
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await asgi.respond(send, 200, await asgi.read_body(receive))


def make_api() -> Api:
    api = Api("test", needs_key=False)
    for endpoint in ENDPOINTS:
        generation.serve(api, endpoint, echo)
    return api


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found = make_api().openapi()
    validate(found)
    return json.loads(json.dumps(found))


def fits(document: dict[str, Any], endpoint: Endpoint[Any], body: dict[str, Any]) -> bool:
    schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}", **document}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def refusal(endpoint: Endpoint[Any], body: dict[str, Any]) -> ApiError | None:
    try:
        endpoint.parse(json.dumps(body).encode(), LIMITS)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_every_endpoint_is_in_the_document(
    document: dict[str, Any], endpoint: Endpoint[Any]
) -> None:
    operation = document["paths"][endpoint.path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_what_must_be_there_is_required(document: dict[str, Any], endpoint: Endpoint[Any]) -> None:
    body = LEAST[endpoint.name]
    assert fits(document, endpoint, body)
    assert refusal(endpoint, body) is None
    for name in body:
        for incomplete in (
            {key: value for key, value in body.items() if key != name},
            body | {name: None},
        ):
            assert not fits(document, endpoint, incomplete)
            error = refusal(endpoint, incomplete)
            assert error is not None
            assert error.param == name


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [(endpoint, name) for endpoint in ENDPOINTS for name in endpoint.neutral],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_is_refused_is_refused_in_the_document_too(
    document: dict[str, Any], endpoint: Endpoint[Any], name: str
) -> None:
    body = LEAST[endpoint.name]
    for harmless in (None, *endpoint.neutral[name]):
        assert fits(document, endpoint, body | {name: harmless})
        assert refusal(endpoint, body | {name: harmless}) is None
    for asking in ({"some": "thing"}, "something", [1], 7):
        assert not fits(document, endpoint, body | {name: asking})
        error = refusal(endpoint, body | {name: asking})
        assert error is not None
        assert (error.code, error.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("endpoint", "field", "value"),
    [
        (CHAT, "temperature", 2.5),
        (CHAT, "n", 0),
        (CHAT, "top_logprobs", 21),
        (CHAT, "stop", ["a"] * 5),
        (CHAT, "messages", "hi"),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "prompt", 7),
        (COMPLETIONS, "seed", 0.5),
        (COMPLETIONS, "cache_salt", ""),
    ],
)
def test_bounds_are_in_the_document(
    document: dict[str, Any], endpoint: Endpoint[Any], field: str, value: object
) -> None:
    body = LEAST[endpoint.name] | {field: value}
    assert not fits(document, endpoint, body)
    error = refusal(endpoint, body)
    assert error is not None
    assert error.param == field


async def test_hot_paths_are_routes_like_others() -> None:
    transport = httpx.ASGITransport(asgi.build(make_api(), max_body_bytes=100))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(CHAT.path, content=b"{}")).content == b"{}"
        wrong = await client.get(CHAT.path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await client.post(CHAT.path + "/x", content=b"{}")).status_code == 404
        assert (await client.post(CHAT.path, content=b"x" * 101)).status_code == 413
