"""The endpoints that generate, as hot paths of an application and in its document."""

from __future__ import annotations

from typing import Any

import msgspec

from radixgrove.protocol.endpoints import Endpoint
from radixgrove.service.api import JSON, REFERENCE, Api, Schema
from radixgrove.service.asgi import App

EVENT_STREAM = "text/event-stream"


def serve(api: Api, endpoint: Endpoint[Any], handler: App) -> None:
    """Answers POST on the endpoint's path with `handler`, beneath FastAPI."""
    answer = api.content(endpoint.form.body)
    answer["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
    operation = {
        "summary": endpoint.name.capitalize(),
        "description": f"With `stream`, the answer comes as `{EVENT_STREAM}`.",
        "requestBody": {"required": True, "content": {JSON: {"schema": api.schema(endpoint.body)}}},
        "responses": {"200": answer, "default": api.error},
    }
    api.hot(endpoint.path, handler, operation, {endpoint.body.__name__: body_schema(endpoint)})


def body_schema(endpoint: Endpoint[Any]) -> Schema:
    """The body with what its type leaves to later checks: what must be there, what is refused."""
    kind = endpoint.body
    _, components = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    schema: Schema = components[kind.__name__]
    properties = schema["properties"]
    schema["required"] = list(endpoint.required)
    for name in endpoint.required:
        properties[name] = {
            "anyOf": [k for k in properties[name]["anyOf"] if k != {"type": "null"}]
        }
    for name, neutral in endpoint.neutral.items():
        properties[name] = {
            "enum": [None, *neutral],
            "description": "Not supported: any other value is refused.",
        }
    return schema
