"""Specs and objects for operator tests."""

from __future__ import annotations

from typing import Any

from radixgrove.operator.api.config import Images, OperatorConfig, RedisSettings, SharedRouter
from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import ModelAt, Revision, revision_of

SERVICE = Service("team-a", "llama", "11111111-2222-3333-4444-555555555555")
CONFIG = OperatorConfig(
    namespace="radixgrove",
    images=Images(worker="rg/worker:1", router="rg/router:1", operator="rg/operator:1"),
    redis=RedisSettings(url="redis://:{password}@radixgrove-redis.radixgrove.svc:6379/0"),
    router=SharedRouter(
        url="http://radixgrove-router.radixgrove.svc.cluster.local/v1",
        labels={"app.kubernetes.io/component": "router", "app.kubernetes.io/name": "radixgrove"},
    ),
)
MODEL = ModelAt(source="hf://org/model", revision="c0ffee", claim="model-1", sub_path="snapshot")


def spec(**fields: Any) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate({"model": {"source": "hf://org/model"}} | fields)


def revision(restart: str = "", config: OperatorConfig = CONFIG, **fields: Any) -> Revision:
    return revision_of(spec(**fields), SERVICE.name, MODEL, restart, config)
