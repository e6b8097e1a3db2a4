"""What one reconciliation knows of its service: what was asked for, what is there, what is wrong.

Filled step by step by the controller; plan and conditions are computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.api.status import InferenceServiceStatus, ModelStatus
from radixgrove.operator.planning.diagnosis import Problem
from radixgrove.operator.planning.image_check import ImageCheck
from radixgrove.operator.planning.model_cache import CacheStep
from radixgrove.operator.planning.model_names import Grant
from radixgrove.operator.planning.observed import ObservedState
from radixgrove.operator.planning.rollback import Rollback
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import InvalidSettings, Revision


@dataclass
class ServiceView:
    service: Service
    spec: InferenceServiceSpec
    created: float  # of the resource, seconds since the epoch
    generation: int  # of its spec
    before: InferenceServiceStatus
    now: float
    observed: ObservedState = field(default_factory=ObservedState)
    revisions: dict[str, Revision] = field(default_factory=dict)  # that groups can be made from
    target: str | None = None  # the revision to run, one of those; None while it cannot be made
    model: CacheStep = field(default_factory=lambda: CacheStep(ModelStatus()))
    names: Grant | None = None  # that it answers to; None: they could not be kept
    invalid: InvalidSettings | None = None  # which settings are refused, and why
    router: Problem | None = None  # why the service's own router does not answer
    routers_behind: bool = False  # routers know an older state than this one
    rollback: Rollback | None = None  # the last good revision runs instead of the one asked for
    image_check: ImageCheck = field(default_factory=ImageCheck)  # of the target's image
    failures: list[str] = field(default_factory=list)  # requests refused, Redis away

    @property
    def desired(self) -> int:
        """Groups that are wanted."""
        return 0 if self.spec.suspend else self.spec.replicas
