"""Which keys a replica may have: those of its namespace, and earlier ones during a change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.registry import Registration, root_fingerprint
from radixgrove.protocol.settings import RouterSettings, reveal
from radixgrove.protocol.tenancy import NamespaceKeys


@dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """What router and replica share."""

    internal_key: str = ""
    cluster_secret: str = ""

    def hasher(self, registration: Registration) -> BlockHasher:
        secret = self.cluster_secret.encode()
        return BlockHasher(secret, registration.namespace, registration.index_block)


class Trust:
    """Keys by namespace, newest first."""

    def __init__(self, settings: RouterSettings) -> None:
        self._root_key = reveal(settings.root_key)
        self._own = [
            ReplicaKeys(reveal(settings.internal_key) or "", reveal(settings.cluster_secret) or "")
        ]
        if settings.previous_cluster_secret is not None:
            previous_key = reveal(settings.previous_internal_key) or ""
            previous_secret = reveal(settings.previous_cluster_secret) or ""
            self._own.append(ReplicaKeys(previous_key, previous_secret))
        self._derived = lru_cache(maxsize=4096)(self._derive)

    def keys(self, registration: Registration, namespace: str) -> ReplicaKeys | None:
        """Those that the replica has, by its fingerprint of the secret; None: it has others.

        `namespace`: of the cluster, as the model table has it; "" where there is none.
        """
        for keys in self._candidates(namespace):
            if root_fingerprint(keys.hasher(registration)) == registration.root:
                return keys
        return None

    def _candidates(self, namespace: str) -> list[ReplicaKeys]:
        if self._root_key is None or not namespace:
            return self._own
        return [self._derived(namespace), *self._own]

    def _derive(self, namespace: str) -> ReplicaKeys:
        assert self._root_key is not None
        keys = NamespaceKeys.of(self._root_key, namespace)
        return ReplicaKeys(keys.internal_key, keys.cluster_secret)
