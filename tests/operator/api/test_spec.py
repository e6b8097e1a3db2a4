"""The resource's definition: the CRD that follows from it, and its mapping to worker settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from radixgrove.operator.api import crd
from radixgrove.operator.render.revision import (
    InvalidEngine,
    config_map_data,
    thaw,
    worker_settings,
)
from radixgrove.protocol.settings import HostWritePolicy, KVDType, Quantize, WorkerSettings
from tests.checkout import ROOT
from tests.operator.operator_builders import CONFIG, revision, spec

CHART_CRD = ROOT / "helm/radixgrove/files/inferenceservice-crd.yaml"
SCHEMA = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += nodes(schema[key], f"{path}[]")
    return found


def test_the_charts_crd_is_the_generated_one() -> None:
    assert CHART_CRD.read_text() == crd.render_yaml(), (
        "write it again: python -m radixgrove.operator.api.crd > helm/radixgrove/files/…"
    )


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_string_list_and_map_is_bounded(part: str) -> None:
    for path, node in nodes(SCHEMA["properties"][part], part):
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "object" and "properties" not in node:
            assert "maxProperties" in node, path


def test_the_schema_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert "type" in node, path
        assert not {"$ref", "anyOf", "title", "exclusiveMinimum"} & set(node), path


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_is_described(part: str) -> None:
    for path, node in nodes(SCHEMA["properties"][part], part):
        assert node.get("description") or path.endswith("[]"), path


def test_a_listing_shows_what_people_ask_first() -> None:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    columns = [c for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert [c["name"] for c in columns] == ["Ready", "Model", "Replicas", "URL", "Age"]
    fields = {path for path, _ in nodes(SCHEMA)} | {".metadata.creationTimestamp"}
    for column in version["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(@\.type==\"\w+\"\)\]", "[]", column["jsonPath"])
        assert path in fields, column


def test_scale_reads_and_writes_fields_that_exist() -> None:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    fields = {path for path, _ in nodes(SCHEMA)}
    assert set(version["subresources"]["scale"].values()) <= fields
    assert version["subresources"]["status"] == {}


def test_a_source_alone_is_one_replica_on_one_gpu() -> None:
    alone = spec()
    assert (alone.replicas, alone.hardware.nodes, alone.hardware.gpus_per_node) == (1, 1, 1)
    assert (alone.layout.tp, alone.layout.pp) == (1, 1)


def test_absent_parallelism_is_tensor_in_the_node_and_pipeline_across() -> None:
    layout = spec(hardware={"nodes": 2, "gpusPerNode": 8}).layout
    assert (layout.tp, layout.pp, layout.dp) == (8, 2, 1)


def test_engine_settings_pass_the_workers_own_schema() -> None:
    rendered = worker_settings(
        revision(
            engine={
                "contextLength": 4096,
                "memoryPercent": 80,
                "kvDtype": "fp8_e4m3",
                "quantize": "fp8",
                "hostCacheGib": 80,
                "hostWritePolicy": "write-back",
                "settings": {"max_step_tokens": 99},
            }
        ),
        "team-a.llama",
        CONFIG,
    )
    settings = WorkerSettings.model_validate(rendered)
    assert settings.max_model_len == 4096
    assert settings.memory_fraction == pytest.approx(0.8)
    assert settings.max_step_tokens == 99
    assert settings.kv_dtype is KVDType.FP8_E4M3
    assert settings.quantize is Quantize.FP8
    assert settings.host_cache_gib == 80
    assert settings.host_write_policy is HostWritePolicy.WRITE_BACK
    assert settings.served_model_name == ["llama"]


def test_kubectl_get_all_shows_services() -> None:
    assert crd.custom_resource_definition()["spec"]["names"]["categories"] == ["all"]


def everyday_fields() -> list[tuple[str, Any]]:
    """Fields of `engine` but for `settings`, and a value that the schema admits."""
    fields = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]
    return [
        (name, field["enum"][-1] if "enum" in field else field["maximum"])
        for name, field in fields.items()
        if name != "settings"
    ]


@pytest.mark.parametrize(("name", "value"), everyday_fields())
def test_what_the_resource_admits_the_worker_takes_and_nothing_beyond(
    name: str, value: Any
) -> None:
    rendered = worker_settings(revision(engine={name: value}), "team-a.llama", CONFIG)
    plain = worker_settings(revision(), "team-a.llama", CONFIG)
    (changed,) = set(rendered) - set(plain)
    assert rendered[changed] == (value / 100 if name == "memoryPercent" else value)
    beyond = value + 1 if isinstance(value, int | float) else "no-such-choice"
    with pytest.raises(ValidationError, match=name):
        spec(engine={name: beyond})
    wrong = revision(engine={"settings": {changed: beyond}})
    with pytest.raises(InvalidEngine, match=changed):
        worker_settings(wrong, "team-a.llama", CONFIG)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_such_setting": 1}, "no_such_setting: there is no such field$"),
        ({"max_runing": 1}, "max_runing: there is no such field; is max_running meant"),
        ({"max_running": 0}, "max_running"),
        ({"port": 1}, "port"),
        ({"internal_key": "x"}, "internal_key"),
    ],
)
def test_a_wrong_engine_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidEngine, match=named):
        worker_settings(revision(engine={"settings": settings}), "s", CONFIG)


def test_a_host_cache_needs_a_prefix_cache() -> None:
    wrong = revision(engine={"hostCacheGib": 8, "settings": {"prefix_cache": False}})
    with pytest.raises(InvalidEngine, match="host_cache_gib: needs prefix_cache"):
        worker_settings(wrong, "s", CONFIG)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pageSize": 32, "settings": {"index_block": 48}}, "index_block: must be a multiple"),
        ({"contextLength": 4096, "kvTokens": 1024}, "kv_tokens: is less than max_model_len 4096"),
        (
            {"kvDtype": "fp8_e4m3", "settings": {"attention_backend": "flashinfer"}},
            "attention_backend: has no kernels",
        ),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidEngine, match=named):
        worker_settings(revision(engine=fields), "s", CONFIG)


def test_attention_for_gpus_is_refused_on_a_cpu() -> None:
    wrong = {"hardware": {"device": "cpu"}, "engine": {"settings": {"attention_backend": "triton"}}}
    with pytest.raises(InvalidEngine, match="attention_backend: needs CUDA, and device is cpu"):
        worker_settings(revision(**wrong), "s", CONFIG)


def test_the_workers_file_holds_no_secret() -> None:
    text = yaml.safe_dump(worker_settings(revision(), "team-a.llama", CONFIG))
    for secret in ("internal_key", "cluster_secret", "management_key", "redis_url"):
        assert secret not in text


def test_a_revision_survives_its_config_map() -> None:
    frozen = revision(engine={"pageSize": 32}, hardware={"device": "cpu"})
    assert thaw(config_map_data(frozen, "team-a.llama", CONFIG)) == frozen


@pytest.mark.parametrize(
    ("field", "value", "admitted"),
    [
        ("memory", "1.5Gi", True),
        ("memory", "8589934592", True),
        ("memory", "0", False),
        ("memory", "16", False),
        ("memory", "500m", False),
        ("sharedMemory", "0", True),
        ("sharedMemory", "00", False),
        ("sharedMemory", "524288", False),
    ],
)
def test_a_size_without_a_unit_is_refused_when_it_is_written_and_served_where_it_was_stored(
    field: str, value: str, admitted: bool
) -> None:
    hardware = SCHEMA["properties"]["spec"]["properties"]["hardware"]["properties"]
    (rule,) = hardware[field]["x-kubernetes-validations"]
    pattern = rule["rule"].removeprefix("self.matches(r'").removesuffix("')")
    assert (re.search(pattern, value) is not None) == admitted
    stored = revision(hardware={"device": "cpu", field: value})
    assert thaw(config_map_data(stored, "team-a.llama", CONFIG)) == stored
