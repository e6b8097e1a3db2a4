"""The CustomResourceDefinition, generated from `spec` and `status`.

Run `python -m radixgrove.operator.api.crd` to print it as YAML.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml
from pydantic import BaseModel

from radixgrove.operator.api import names
from radixgrove.operator.api.spec import MAX_NAME, InferenceServiceSpec, SpecModel
from radixgrove.operator.api.status import InferenceServiceStatus
from radixgrove.operator.api.values import WORDS

Schema = dict[str, Any]

_KEPT = {
    "type", "description", "default", "enum", "pattern", "format", "minimum", "maximum",
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
}  # fmt: skip


_NAME_RULES = [
    {
        "rule": f"self.metadata.name.size() <= {MAX_NAME}",
        "message": f"a name has at most {MAX_NAME} characters",
    },
    {
        "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "message": "a name must be fit for a Service: lower-case letters, digits and dashes, a "
        "letter first",
    },
    {
        "rule": "self.metadata.name != 'default'",
        "message": "a service must not be called default: its ServiceAccount has its name, and "
        "every namespace has one called default",
    },
]


def structural_schema(model: type[BaseModel]) -> Schema:
    """A pydantic model as a structural schema: no references, no `anyOf`, CEL rules in place."""
    root = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(root, root.get("$defs", {}), _models(model))


def _models(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    pending = [model]
    while pending:
        current = pending.pop()
        if current.__name__ in found:
            continue
        found[current.__name__] = current
        for field in current.model_fields.values():
            pending += [t for t in _types(field.annotation) if issubclass(t, BaseModel)]
    return found


def _types(annotation: Any) -> list[type]:
    arguments = getattr(annotation, "__args__", ())
    if not arguments:
        return [annotation] if isinstance(annotation, type) else []
    return [found for argument in arguments for found in _types(argument)]


def _convert(node: Schema, definitions: Schema, models: dict[str, type[BaseModel]]) -> Schema:
    if "anyOf" in node:  # pydantic's form of an optional field
        (choice,) = [option for option in node["anyOf"] if option.get("type") != "null"]
        node = {**choice, **{key: value for key, value in node.items() if key != "anyOf"}}
        node = {key: value for key, value in node.items() if (key, value) != ("default", None)}
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    schema = {key: value for key, value in node.items() if key in _KEPT}
    if WORDS in node:
        schema["x-kubernetes-validations"] = [_in_words(schema.pop("pattern"), node[WORDS])]
    if node.get("type") == "array":
        schema["items"] = _convert(node["items"], definitions, models)
    if node.get("type") != "object":
        return schema
    if "properties" not in node:
        return _free_map(schema, node, definitions, models)
    if isinstance(schema.get("default"), dict):
        # In full: validation rules see a default before the defaults of its fields are filled in.
        schema["default"] = _without_nulls(schema["default"])
    schema["properties"] = {
        name: _convert(child, definitions, models) for name, child in node["properties"].items()
    }
    if node.get("required"):
        schema["required"] = sorted(node["required"])
    owner = models.get(node.get("title", ""))
    if owner is not None and issubclass(owner, SpecModel) and owner.rules:
        schema["x-kubernetes-validations"] = [
            {
                "rule": rule.rule,
                "message": rule.message,
                **({"fieldPath": rule.field_path} if rule.field_path else {}),
            }
            for rule in owner.rules
        ]
    return schema


def _in_words(pattern: str, words: str) -> Schema:
    """A rule in place of a pattern, which the API server would quote."""
    return {
        "rule": f"self.matches(r'{pattern}')",
        "message": words,
        "messageExpression": f"'\"' + self + '\" {words}'",
    }


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def _free_map(
    schema: Schema, node: Schema, definitions: Schema, models: dict[str, type[BaseModel]]
) -> Schema:
    values = node.get("additionalProperties")
    if isinstance(values, dict) and values:
        return {**schema, "additionalProperties": _convert(values, definitions, models)}
    return {**schema, "x-kubernetes-preserve-unknown-fields": True}


def custom_resource_definition() -> Schema:
    """The CRD as the chart carries it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": [names.SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Schema:
    return {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            _column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
            _column("Model", "string", ".status.model.name"),
            _column("Replicas", "string", ".status.summary"),
            _column("URL", "string", ".status.url"),
            _column("Age", "date", ".metadata.creationTimestamp"),
            _column(
                "Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', priority=1
            ),
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": "A served language model.",
                "required": ["spec"],
                "x-kubernetes-validations": _NAME_RULES,
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": structural_schema(InferenceServiceSpec),
                    "status": structural_schema(InferenceServiceStatus),
                },
            }
        },
    }


def _column(name: str, kind: str, path: str, priority: int = 0) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def render_yaml() -> str:
    return yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=100)


if __name__ == "__main__":
    sys.stdout.write(render_yaml())
