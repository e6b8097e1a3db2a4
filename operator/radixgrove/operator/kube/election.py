"""Leader election by a Lease, and the fence that goes with it.

One replica writes at a time. A leader that was stopped for longer than its lease finds, at its next
write, that its time is over: the check is against the clock, not against what it last believed.
Source: the leader election of client-go, the timing of which this follows.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from radixgrove.operator.api import metrics, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import LEASE, LeaseSpec, Object
from radixgrove.operator.kube.client import Kube, KubeError, NotLeading
from radixgrove.operator.kube.installation import owners
from radixgrove.operator.kube.renewals import Renewals

logger = logging.getLogger(__name__)


class LeaderElection:
    """`run` in a thread of its own; `may_write` from anywhere.

    `pod`: of this process, empty outside of any. The kubelet starts a pod's container only when the
    one before has ended: what that still holds is taken at once.
    """

    def __init__(self, config: OperatorConfig, pod: str) -> None:
        self._config = config
        self._namespace = config.namespace
        self._pod = pod
        own = f"{os.getpid()}-{time.time_ns()}"
        self._identity = f"{pod}/{own}" if pod else f"{socket.gethostname()}-{own}"
        self._settings = config.election
        self._valid_until = 0.0  # monotonic; of the last renewal, counted from before its request
        self._renewals = Renewals(self._settings.duration)
        self.stopping = threading.Event()

    def may_write(self, seconds: float) -> bool:
        """Whether the lease outlives a write of so many seconds, or of a third of its duration.

        No more is asked, so that a renewal that is a little late stops nothing.
        """
        return time.monotonic() + min(seconds, self._settings.duration / 3) < self._valid_until

    @property
    def leading(self) -> bool:
        return time.monotonic() < self._valid_until

    def run(self, kube: Kube, started: Callable[[], None], lost: Callable[[], None]) -> None:
        """Campaigns until `stopping`; `started` once it leads. `lost`, and the end, when it no
        longer does: this process does not run again.

        `kube` must not be fenced by this very election.
        """
        led = False
        while not self.stopping.is_set():
            self._try(kube)
            if self.leading and not led:
                led = True
                metrics.LEADER.set(1)
                logger.info("leading", extra={"identity": self._identity})
                started()
            elif led and not self.leading:
                metrics.LEADER.set(0)
                lost()
                return
            self.stopping.wait(self._settings.renew_every)
        metrics.LEADER.set(0)
        if led:
            self._release(kube)

    def _try(self, kube: Kube) -> None:
        before = time.monotonic()
        try:
            lease = kube.get(LEASE, self._namespace, self._settings.lease)
            if lease is None:
                made = self._lease(transitions=0)
                made["metadata"]["ownerReferences"] = owners(kube, self._config)
                kube.create(made)
            elif self._may_take(spec := lease.get("spec") or LeaseSpec()):
                mine = spec.get("holderIdentity") == self._identity
                transitions = (spec.get("leaseTransitions") or 0) + (0 if mine else 1)
                renewed = self._lease(transitions)
                renewed["metadata"] = lease["metadata"]
                kube.replace(renewed)
            else:
                return
        except (KubeError, NotLeading) as error:
            logger.warning("cannot renew the lease: %s", error)
            return
        self._valid_until = before + self._settings.duration

    def _may_take(self, spec: LeaseSpec) -> bool:
        """Whether the lease is ours, free, or of a process that has ended or is silent."""
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._identity) or (self._pod and holder.startswith(f"{self._pod}/")):
            return True
        return self._renewals.are_overdue(self._settings.lease, spec)

    def _lease(self, transitions: int, holder: str | None = None) -> Object:
        now = times.to_text(time.time()).replace("Z", "000Z")  # MicroTime
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._settings.lease, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": int(self._settings.duration),
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }

    def _release(self, kube: Kube) -> None:
        """The next one need not wait."""
        try:
            lease = kube.get(LEASE, self._namespace, self._settings.lease)
            spec = (lease.get("spec") if lease is not None else None) or LeaseSpec()
            if lease is not None and spec.get("holderIdentity") == self._identity:
                released = self._lease(spec.get("leaseTransitions") or 0, holder="")
                released["metadata"] = lease["metadata"]
                kube.replace(released)
        except (KubeError, NotLeading) as error:
            logger.warning("cannot release the lease: %s", error)
        self._valid_until = 0.0
