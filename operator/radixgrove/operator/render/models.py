"""The model cache: a claim for each revision of each source, and the Jobs that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import ClaimObject, Object
from radixgrove.operator.api.spec import NO_FIELDS, CacheSpec, Model, PodFields
from radixgrove.operator.fetch.download import HOPELESS
from radixgrove.operator.render.common import (
    Service,
    container_security_context,
    metadata,
    pod_security_context,
    secret_env,
    with_pod_defaults,
)
from radixgrove.operator.render.pods import with_fields
from radixgrove.protocol.model.fit import Intended

_FETCHER = "fetch"
# Fields that the API server keeps from changing, or lets only grow.
_FIXED = ("accessModes", "resources", "storageClassName")


@dataclass(frozen=True)
class User:
    """A service as the model cache sees it."""

    service: Service
    cache: CacheSpec
    claim: str = ""  # that it uses already


def claim(
    name: str,
    users: Sequence[User],
    model: Model,
    revision: str,
    config: OperatorConfig,
    live: ClaimObject | None = None,
) -> Object:
    """The claim, owned by all its users; by none when one of them wants it kept.

    All of them render the same: `users` come with the oldest first, who says how a new claim is to
    be. One that exists (`live`) stays as it is.
    """
    defaults = config.model_cache
    cache = users[0].cache
    rendered: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": name,
            "namespace": users[0].service.namespace,
            "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: names.MODEL_CACHE_NAME},
            "annotations": {names.SOURCE: model.source, names.RESOLVED: revision},
        },
        "spec": {
            "accessModes": [(cache.access_mode or defaults.access_mode).value],
            "resources": {"requests": {"storage": cache.size or defaults.size}},
        },
    }
    storage_class = cache.storage_class or defaults.storage_class
    if storage_class:
        rendered["spec"]["storageClassName"] = storage_class
    if live is not None:
        rendered["spec"] = {key: value for key, value in live["spec"].items() if key in _FIXED}
    kept = any(user.cache.retain for user in users)
    # An empty list, not none: that is how earlier owners are taken off.
    owners = [] if kept else [user.service.shared_owner for user in users]
    rendered["metadata"]["ownerReferences"] = owners
    return rendered


def download_job(
    name: str,
    service: Service,
    model: Model,
    revision: str,
    config: OperatorConfig,
    intended: Intended | None = None,
    fields: PodFields = NO_FIELDS,
) -> Object:
    """Fills the claim `name`; a second run resumes, and checks every file's hash.

    `intended`: what the model must be fit for, or nothing is fetched.
    """
    fitness = _fitness(intended)
    arguments = ["download", "--source", model.source, "--revision", revision, "--into", "/models"]
    job = _job(service, name, names.DOWNLOAD, model, [*arguments, *fitness], config, fields)
    job["metadata"]["annotations"] = {names.INTENDED: names.digest(fitness)}
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": "/models"})
    pod["volumes"].append({"name": "models", "persistentVolumeClaim": {"claimName": name}})
    return job


def _fitness(intended: Intended | None) -> list[str]:
    """As arguments of the fetcher."""
    if intended is None:
        return []
    arguments = ["--tp", str(intended.tp)]
    if intended.pp > 1:
        arguments += ["--pp", str(intended.pp)]
    if intended.ep > 1:
        arguments += ["--ep", str(intended.ep)]
    if intended.dtype:
        arguments += ["--dtype", intended.dtype]
    if intended.quantize:
        arguments += ["--quantize", intended.quantize]
    if intended.max_model_len is not None:
        arguments += ["--max-model-len", str(intended.max_model_len)]
    if intended.memory:
        arguments += ["--memory", str(intended.memory)]
    return arguments


def resolve_job_name(service: Service, model: Model) -> str:
    return f"{service.name}-resolve-{names.digest([model.source, model.revision])}"


def resolve_job(
    service: Service, model: Model, config: OperatorConfig, fields: PodFields = NO_FIELDS
) -> Object:
    """Finds out which commit (or listing, on s3) the source stands for now.

    A Job, because it has the token: the operator itself reads no user's secrets.
    """
    arguments = ["resolve", "--source", model.source]
    if model.revision:
        arguments += ["--revision", model.revision]
    name = resolve_job_name(service, model)
    return _job(service, name, names.RESOLVE, model, arguments, config, fields)


def _job(
    service: Service,
    name: str,
    component: str,
    model: Model,
    arguments: list[str],
    config: OperatorConfig,
    fields: PodFields,
) -> Object:
    labels = names.labels(service.name, component)
    pod = with_pod_defaults(
        {
            "restartPolicy": "Never",
            "serviceAccountName": service.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security_context(),
            "containers": [_fetcher(model, arguments, config)],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
        config,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service, name, component),
        "spec": {
            "backoffLimit": 3,
            # A failure that another try would not change is final at once.
            "podFailurePolicy": {"rules": [_give_up_on(HOPELESS)]},
            "template": with_fields(
                {"metadata": {"labels": labels}, "spec": pod},
                _FETCHER,
                labels,
                config.pods.downloads,
                fields,
            ),
        },
    }


def _fetcher(model: Model, arguments: list[str], config: OperatorConfig) -> Object:
    return {
        "name": _FETCHER,
        "image": config.images.operator,
        "imagePullPolicy": config.images.pull_policy,
        "args": ["python", "-m", "radixgrove.operator.fetch", *arguments],
        "env": [
            {"name": "HF_ENDPOINT", "value": config.model_cache.hub_endpoint},
            {"name": "HOME", "value": "/tmp"},
            *_credentials(model),
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _give_up_on(exit_code: int) -> Object:
    codes = {"containerName": _FETCHER, "operator": "In", "values": [exit_code]}
    return {"action": "FailJob", "onExitCodes": codes}


def _credentials(model: Model) -> list[Object]:
    if model.token_secret:
        return [secret_env("HF_TOKEN", model.token_secret, "token")]
    if model.credentials_secret:
        required = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        optional = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")
        return [
            *(secret_env(key, model.credentials_secret, key) for key in required),
            *(secret_env(key, model.credentials_secret, key, optional=True) for key in optional),
        ]
    return []
