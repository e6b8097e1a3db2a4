"""The operator as a whole: its threads, and what happens in which order.

Watches (kopf's loop) → queue → reconcilers (threads) → API server and Redis. Everything that
writes starts once the lease is held, and ends with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from radixgrove.operator.api import metrics, names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import NODE, SERVICE, ChildObject, NodeObject, ServiceObject
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.autoscaler import Autoscaler
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.reconciler import Incomplete, Reconciler
from radixgrove.operator.controller.store import Key, Store, owner_key
from radixgrove.operator.controller.workqueue import WorkQueue
from radixgrove.operator.kube.client import Kube, KubeError, NotLeading
from radixgrove.operator.kube.keys import Keys
from radixgrove.service.redis_client import connect
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GUARD_EVERY = 60.0
_REWRITE_EVERY = 5.0
_KEYS_EVERY = 15.0
_LONGEST_LOOK = 600.0
_REDIS_TIMEOUT = 3.0


class App:
    """One leading operator. `start` once the lease is held, `stop` when it ends.

    Setting `stopping` makes everything of it end, `start` too.
    """

    def __init__(self, kube: Kube, config: OperatorConfig, stopping: threading.Event) -> None:
        self.config = config
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(namespace=lambda key: key[0])
        self._kube = kube
        self._stopping = stopping
        self._threads: list[threading.Thread] = []
        self._busy_since: dict[str, float] = {}
        self._lagging: dict[Key, str] = {}
        self._frozen = ""
        self._heartbeat = time.monotonic()

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads every service first: routers must not lose those that are looked at last.

        Waits for the API server as long as it takes.
        """
        keys = Keys(self._kube, self.config)
        if self._insist(keys.ensure) is None:
            return
        if self._insist(self._seed) is None:
            return
        client = connect(keys.operator_url(), _REDIS_TIMEOUT)
        redis_side = RedisStore(client, self.config.redis.prefix)
        users = RedisUsers(client, keys, self.config.redis)
        access = Access(self._kube, self.store, keys, users, self.config, self.queue.hint)
        if self._insist(access.start) is None:
            return
        redis_side.expect({n.service.key for n in self.store.services()})
        ledger = NameLedger(self._kube, self.store, self.config, self.queue.hint)
        autoscaler = Autoscaler(
            self._kube, self.store, redis_side, lambda key: reconciler.serving(key),
            self.config.installation, self.config.autoscale_every,
        )  # fmt: skip
        reconciler = Reconciler(
            self._kube, self.store, access, ledger, redis_side, WorkerProbe(),
            self.config, autoscaler.last, self.queue.hint,
        )  # fmt: skip
        for number in range(self.config.reconcilers):
            name = f"reconciler-{number}"
            self._thread(name, partial(self._work, name, reconciler))
        self._thread("autoscaler", lambda: autoscaler.run(self._stopping))
        self._thread("model-table", lambda: self._rewrite(redis_side, access))
        self._thread("watch-guard", self._guard)
        self._thread("keys", lambda: self._keep(keys, ledger))

    def stop(self) -> None:
        self._stopping.set()
        self.queue.close()
        for thread in self._threads:
            thread.join(self.config.request_timeout + 5.0)

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _insist(self, act: Callable[[], T]) -> T | None:
        """Tries until it works; None when the app stops first.

        Waiting for the API server, or for a verb to be given back, is no fault of this process.
        """
        while not self._stopping.is_set():
            self.beat()
            try:
                return act()
            except (KubeError, NotLeading) as error:
                logger.error("cannot start yet: %s", error)
            self._stopping.wait(2.0)
        return None

    def _seed(self) -> bool:
        for body in self._list_services():
            self.store.service_seen(body)
            self.queue.add((body["metadata"]["namespace"], body["metadata"]["name"]))
        for node in self._kube.list(NODE, None):
            self.store.node_seen(node)
        return True

    def _list_services(self) -> list[ServiceObject]:
        if not self.config.namespaces:
            return self._kube.list(SERVICE, None)
        served = self.config.namespaces
        return [body for namespace in served for body in self._kube.list(SERVICE, namespace)]

    # ---- events, from kopf's loop: nothing here blocks -------------------------------------------

    def service_event(self, kind: str | None, body: ServiceObject) -> None:
        """A status that changed alone is mostly this operator's own write: it does not shorten a
        service's back-off after failures."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if kind == "DELETED":
            for other in self.store.service_gone(key):
                self.queue.add(other)
            self.queue.add(key)
        elif self.store.service_seen(body):
            self.queue.add(key)
        else:
            self.queue.hint(key)

    def child_event(self, resource_kind: str, kind: str | None, body: ChildObject) -> None:
        meta = body["metadata"]
        version = None if kind == "DELETED" else meta.get("resourceVersion")
        self._kube.changed(resource_kind, meta["namespace"], meta["name"], version)
        key = owner_key(body)
        if resource_kind == "Job":  # one service's Job may fill the claim of several
            for other_service in self.store.services():
                if (other_service.service.namespace, other_service.claim) == (
                    meta["namespace"],
                    meta["name"],
                ):
                    self.queue.add(other_service.key)
        if key is not None:
            self.queue.add(key)
        elif meta.get("labels", {}).get(names.MANAGED_BY) == names.MANAGER:
            for other_service in self.store.services():  # shared by the namespace's services
                if other_service.service.namespace == meta["namespace"]:
                    self.queue.add(other_service.key)

    def node_event(self, kind: str | None, body: NodeObject) -> None:
        if kind == "DELETED":
            self.store.node_gone(body["metadata"]["name"])
        elif not self.store.node_seen(body):
            return
        for other_service in self.store.services():
            self.queue.add(other_service.key)

    def beat(self) -> None:
        """The main thread is alive: kopf's loop, or `start` before it."""
        self._heartbeat = time.monotonic()

    # ---- threads ---------------------------------------------------------------------------------

    def _work(self, name: str, reconciler: Reconciler) -> None:
        while not self._stopping.is_set():
            key = self.queue.get(1.0)
            if key is not None:
                self._work_on(key, name, reconciler)

    def _work_on(self, key: Key, name: str, reconciler: Reconciler) -> None:
        self._busy_since[name] = time.monotonic()
        delay, failure = self._look(reconciler, key)
        self._busy_since.pop(name, None)
        again = self.queue.done(key, failed=bool(failure))
        if failure:
            logger.warning("%s/%s: %s; again in %.1f s", *key, failure, again)
        elif delay is not None:
            self.queue.add(key, delay)

    def _look(self, reconciler: Reconciler, key: Key) -> tuple[float | None, str]:
        """Seconds to the next look, and why this one failed; "" if it did not."""
        with metrics.RECONCILE_SECONDS.time():
            try:
                return reconciler.reconcile(key), ""
            except NotLeading as error:
                # A late renewal may still come; once the lease is lost, the whole process ends.
                return None, str(error)
            except Incomplete as error:
                metrics.RECONCILE_ERRORS.labels("incomplete").inc()
                return None, str(error)
            except KubeError as error:
                metrics.RECONCILE_ERRORS.labels(str(error.status or "no answer")).inc()
                return None, f"{error} ({error.status or 'no answer'})"
            except Exception as error:
                metrics.RECONCILE_ERRORS.labels("bug").inc()
                logger.exception("%s/%s: unexpected", *key)
                return None, f"unexpected: {error!r}"

    def _rewrite(self, redis_side: RedisStore, access: Access) -> None:
        """Routers wait for the table: an empty one is written too, as soon as Redis answers."""
        kept = False
        while True:
            self._keep_users(access)  # first: Redis may wait for them
            try:
                if not kept:
                    redis_side.keep_only({names.service_key(*key) for key in self.store.known()})
                    kept = True
                redis_side.rewrite()
            except RedisUnavailable as error:
                logger.warning("model tables are not kept up: Redis: %s", error)
            if self._stopping.wait(_REWRITE_EVERY if kept else 1.0):
                return

    def _keep_users(self, access: Access) -> None:
        try:
            access.keep()
        except (RedisUnavailable, KubeError, NotLeading) as error:
            logger.warning("users of Redis are not kept up: %s", error)

    def _keep(self, *kept: Keys | NameLedger) -> None:
        """Looks at what is not watched: to watch one Secret takes the right to all of them."""
        while not self._stopping.wait(_KEYS_EVERY):
            try:
                for one in kept:
                    one.keep()
            except (KubeError, NotLeading) as error:
                logger.warning("cannot look after keys and names: %s", error)

    def _guard(self) -> None:
        """Compares watch and list: a watch that fell silent is healed, and makes liveness fail."""
        while not self._stopping.wait(_GUARD_EVERY):
            try:
                listed = {
                    (b["metadata"]["namespace"], b["metadata"]["name"]): b
                    for b in self._list_services()
                }
            except (KubeError, NotLeading) as error:
                logger.warning("cannot compare the watch with a list: %s", error)
                continue
            lagging = {
                key: body["metadata"]["resourceVersion"]
                for key, body in listed.items()
                if self.store.version(key) != body["metadata"]["resourceVersion"]
            }
            # Lagging at the very same version twice: the event never came.
            silent = {k for k, v in lagging.items() if self._lagging.get(k) == v}
            self._frozen = "the watch is silent" if silent else ""
            for key in silent:
                self.store.service_seen(listed[key])
                self.queue.add(key)
            for key in self.store.known() - listed.keys():
                self.queue.add(key)
            self._lagging = lagging

    # ---- health ----------------------------------------------------------------------------------

    def trouble(self) -> str:
        now = time.monotonic()
        if now - self._heartbeat > 60.0:
            return "the event loop is stuck"
        if any(now - since > _LONGEST_LOOK for since in list(self._busy_since.values())):
            return "a reconciliation is stuck"
        ended = [thread.name for thread in self._threads if not thread.is_alive()]
        if ended and not self._stopping.is_set():
            return f"the thread {ended[0]} has ended"
        return self._frozen
