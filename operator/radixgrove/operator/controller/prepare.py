"""Keeps what a service has besides its groups: keys, guards, router and model; and its revision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import CLAIM, JOB, NETWORK_POLICY, POD, Object
from radixgrove.operator.api.spec import NO_FIELDS
from radixgrove.operator.controller import dedicated_router
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.pod_events import not_admitted, with_mounts
from radixgrove.operator.controller.store import OtherService, Store, other_service_of
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.planning import image_check, model_cache, rollback
from radixgrove.operator.planning.demand import demand_of, largest_gpu
from radixgrove.operator.planning.image_check import ImageCheck
from radixgrove.operator.planning.observed import JobState, job_of
from radixgrove.operator.render import group as render_group
from radixgrove.operator.render import models, policies
from radixgrove.operator.render.image_check import image_check_job, image_check_name
from radixgrove.operator.render.revision import (
    InvalidEngine,
    ModelAt,
    Revision,
    revision_of,
)
from radixgrove.protocol.model.fit import Intended


class Preparer:
    """Thread-safe for different services."""

    def __init__(
        self, kube: Kube, store: Store, access: Access, ledger: NameLedger, config: OperatorConfig
    ) -> None:
        self._kube = kube
        self._store = store
        self._access = access
        self._ledger = ledger
        self._config = config

    def prepare(self, context: ReconcileContext) -> None:
        """Fills `keys`, `router`, `invalid`, `model`, `target` and `names`."""
        own = other_service_of(context.body)
        assert own is not None
        other_services = self._store.services()
        same_namespace = [n for n in other_services if n.service.namespace == own.service.namespace]
        with context.trying():
            neighbours = [other.service for other in same_namespace if other.key != own.key]
            context.keys = self._access.give(context.service, neighbours)
        with context.trying():
            self._access.admit(context.service)
        for child in self._guards(context):
            with context.trying():
                self._kube.apply_cached(child)
        if context.spec.router.dedicated:
            dedicated_router.keep(self._kube, context, self._config)
        else:
            dedicated_router.remove(self._kube, context, self._config)
        self._remove_policies(context)
        intended = self._check(context)
        self._model(context, own, same_namespace, intended)
        # Groups made before their namespace has the new keys would start with the old ones, and
        # keep them.
        if context.keys:
            self._target(context)
            self._safeguard(context)
        with context.trying():
            context.names = self._ledger.grant(own, context.now, _running(context))

    def _guards(self, context: ReconcileContext) -> Iterator[Object]:
        service, config = context.service, self._config
        yield policies.service_account(service)
        if config.network_policies.enabled:
            yield policies.worker_network_policy(service, context.spec.router.dedicated, config)

    def _remove_policies(self, context: ReconcileContext) -> None:
        """NetworkPolicies from before they were switched off in the chart."""
        if self._config.network_policies.enabled:
            return
        labels = {names.MANAGED_BY: names.MANAGER, names.SERVICE: context.service.name}
        with context.trying():
            for policy in self._kube.list(NETWORK_POLICY, context.service.namespace, labels):
                meta = policy["metadata"]
                self._kube.delete("NetworkPolicy", meta["namespace"], meta["name"], meta["uid"])

    def _model(
        self,
        context: ReconcileContext,
        own: OtherService,
        other_services: list[OtherService],
        intended: Intended | None,
    ) -> None:
        namespace, known = context.service.namespace, context.before.model
        jobs: dict[str, JobState] = {}
        for name in model_cache.wanted_jobs(context.service, context.spec, known):
            if (job := self._job(namespace, name)) is not None:
                jobs[name] = job
        found = {
            name: self._kube.get(CLAIM, namespace, name)
            for name in model_cache.wanted_claims(context.spec, known)
        }
        claims = {name: claim for name, claim in found.items() if claim is not None}
        users = sorted({n.key: n for n in [*other_services, own]}.values(), key=lambda n: n.age)
        cache = model_cache.Cache(
            jobs,
            claims,
            [models.User(n.service, n.spec.model.cache, n.claim) for n in users],
            intended,
            context.spec.pods.downloads or NO_FIELDS,
        )
        step = model_cache.decide(
            context.service, context.spec, known, cache, self._config, context.now
        )
        if isinstance(context.invalid, InvalidEngine) and not step.ready:
            model_cache.withhold(step, context.invalid)
        for child in step.apply:
            with context.trying():
                self._kube.apply_cached(child)
        for done in step.delete_jobs:
            with context.trying():
                self._kube.delete("Job", namespace, done.name, done.uid)
        context.model = step

    def _check(self, context: ReconcileContext) -> Intended | None:
        """Refuses what cannot run before a model is fetched for it; what that must be fit for."""
        wanted = self._revision(context, ModelAt(source=context.spec.model.source))
        try:
            pod = render_group.check(context.service, wanted, self._config)
        except InvalidEngine as error:
            context.invalid = error
            return None
        if not render_group.is_own_worker(pod, wanted):
            return None
        nodes = self._store.nodes().values()
        return render_group.intended(wanted, pod, largest_gpu(demand_of(pod), nodes))

    def _target(self, context: ReconcileContext) -> None:
        """The revision that groups are to run; none while it is refused."""
        step = context.model
        if step.at is None or not step.ready or isinstance(context.invalid, InvalidEngine):
            return
        target = self._revision(context, step.at, step.size)
        context.target = target.hash
        context.revisions.setdefault(target.hash, target)  # as it was frozen

    def _safeguard(self, context: ReconcileContext) -> None:
        """Gives up a target that did not start, and tries its image before a ready group goes."""
        if context.target is None:
            return
        groups = context.observed.groups
        context.rollback = rollback.decide(
            context.target, context.before, groups, context.revisions, context.now
        )
        if context.rollback is not None:
            context.target = context.before.good_revision
        wanted = image_check.candidate(
            groups,
            context.target,
            context.spec.rollout.max_unavailable,
            lambda revision: self._image_of(context, revision),
        )
        if wanted is not None and context.desired:
            context.image_check = self._try(context, wanted)

    def _image_of(self, context: ReconcileContext, revision: str) -> str:
        known = context.revisions.get(revision)
        if known is None:
            return ""
        try:
            return render_group.own_image(context.service, known, self._config)
        except InvalidEngine:  # of an older operator
            return ""

    def _try(self, context: ReconcileContext, wanted: image_check.Candidate) -> ImageCheck:
        assert context.target is not None
        service, namespace = context.service, context.service.namespace
        name = image_check_name(service, wanted.image, wanted.nodes)
        if (job := self._job(namespace, name)) is not None:
            return image_check.judge(wanted, job)
        revision = context.revisions[context.target]
        rendered = render_group.stateful_set(service, revision, 0, 0, self._config)
        pod = rendered["spec"]["template"]["spec"]
        with context.trying():
            tries = names.labels(service.name, names.IMAGE_CHECK)
            for other in self._kube.list(JOB, namespace, tries):  # of images wanted before
                meta = other["metadata"]
                self._kube.delete("Job", namespace, meta["name"], meta["uid"])
            self._kube.apply(image_check_job(service, pod, wanted.nodes))
        return image_check.judge(wanted, None)

    def _job(self, namespace: str, name: str) -> JobState | None:
        job = self._kube.get(JOB, namespace, name)
        if job is None:
            return None
        state = job_of(job, self._kube.list(POD, namespace, {"job-name": name}))
        if state.pod is None:
            if state.succeeded or state.failed:
                return state
            return replace(state, refused=not_admitted(self._kube, namespace, name, state.uid))
        return replace(state, pod=with_mounts(self._kube, namespace, state.pod))

    def _revision(self, context: ReconcileContext, model: ModelAt, size: int = 0) -> Revision:
        restart = context.body["metadata"].get("annotations", {}).get(names.RESTART, "")
        return revision_of(
            context.spec, context.service.name, model, restart, self._config, context.keys, size
        )


def _running(context: ReconcileContext) -> tuple[str, ...]:
    """The names of the revision that runs, where it is not the one asked for."""
    if context.rollback is None or context.target is None:
        return ()
    return tuple(context.revisions[context.target].names)
