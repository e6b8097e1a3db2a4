"""JSON Schemas of the kinds that the chart renders and Kubernetes itself does not bring.

Made from the CRDs that their projects publish (under the Apache license 2.0), without descriptions,
and strict: a field that a CRD does not know is an error, as for `kubectl apply --validate=strict`.
Their CEL rules are left out.

    go mod download sigs.k8s.io/gateway-api@v1.4.1
    go mod download github.com/prometheus-operator/prometheus-operator@v0.92.1
    python -m tests.chart.foreign "$(go env GOMODCACHE)"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]

_PROMETHEUS = "github.com/prometheus-operator/prometheus-operator@v0.92.1"
_MONITORING = f"{_PROMETHEUS}/example/prometheus-operator-crd/monitoring.coreos.com"
_GATEWAY = "sigs.k8s.io/gateway-api@v1.4.1/config/crd/standard/gateway.networking.k8s.io"
CRDS = {
    "HTTPRoute": f"{_GATEWAY}_httproutes.yaml",
    "PodMonitor": f"{_MONITORING}_podmonitors.yaml",
    "PrometheusRule": f"{_MONITORING}_prometheusrules.yaml",
    "ServiceMonitor": f"{_MONITORING}_servicemonitors.yaml",
}
_KEPT = (
    "type", "enum", "pattern", "required", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems",
)  # fmt: skip
_FOLDER = Path(__file__).parent / "schemas"


def validate(rendered: Schema) -> None:
    """Raises jsonschema.ValidationError naming the field, AssertionError for another version."""
    schema = json.loads((_FOLDER / f"{rendered['kind']}.json").read_text())
    assert rendered["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(rendered, schema["object"])


def convert(node: Schema) -> Schema:
    """A CRD's structural schema as a strict JSON Schema."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    schema = {key: node[key] for key in _KEPT if key in node}
    if "(?i)" in node.get("pattern", ""):  # Go takes the flag anywhere, Python only in front
        schema["pattern"] = "(?i)" + node["pattern"].replace("(?i)", "")
    if "items" in node:
        schema["items"] = convert(node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = convert(node["additionalProperties"])
    if "properties" in node:
        schema["properties"] = {key: convert(child) for key, child in node["properties"].items()}
        schema["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
    return schema


def main(modules: Path) -> None:
    for kind, path in CRDS.items():
        spec = yaml.safe_load((modules / path).read_text())["spec"]
        (version,) = (v for v in spec["versions"] if v["storage"])
        schema = convert(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        schema["properties"].pop("status", None)
        made = {"apiVersion": f"{spec['group']}/{version['name']}", "object": schema}
        text = json.dumps(made, indent=1, sort_keys=True)
        (_FOLDER / f"{kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
