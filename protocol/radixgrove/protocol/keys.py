"""Names of everything radixgrove keeps in Redis.

All keys of one service share a hash tag, so that a script may touch them together on Redis Cluster:

    {prefix}:services                     SET     names of services that ever registered a replica
    {prefix}:router:<router id>           STRING  ends soon after the router's last heartbeat
    {prefix}:{<service>}:heartbeat:<id>   STRING  the same of a replica, or of a dedicated router
    {prefix}:users                        STRING  mark of the users that the operator has made
    {prefix}:{<service>}:demand           HASH    router id → JSON of `model_table.Demand`
    {prefix}:{<service>}:identity         STRING  JSON, which replicas of release 0.1 compare
    {prefix}:{<service>}:replicas         HASH    replica id → `registry.Registration` as JSON
    {prefix}:{<service>}:leases           HASH    generation → packed `registry.Lease`
    {prefix}:{<service>}:sequences        HASH    generation → last applied event batch
    {prefix}:{<service>}:routers          ZSET    router id → end of its lease, ms of Redis's clock
    {prefix}:{<service>}:reserved         HASH    reservation id → generation, router, tokens, time
    {prefix}:{<service>}:pending:<0|1>    HASH    member → generations that are computing it now
    {prefix}:{<service>}:gpu:<generation>   SET   members of the GPU tier's prefix tree
    {prefix}:{<service>}:host:<generation>  SET   members of the host tier
    {prefix}:{<service>}:load:<generation>  HASH  router id → "requests tokens"; "@busy" → ms
    {prefix}:{<service>}:snapshot:<tier>:<generation>  SET  a snapshot on its way
"""

from __future__ import annotations

TIERS = ("gpu", "host")


def services_key(prefix: str) -> str:
    return f"{prefix}:services"


def router_key(prefix: str, router_id: str) -> str:
    return f"{prefix}:router:{router_id}"


# The field of a generation's load that holds `registry.Measured`, as JSON. Others that begin with
# `@` are the scripts' own.
MEASURED = "@measured"


class ServiceKeys:
    """Key names of one service."""

    def __init__(self, prefix: str, service: str) -> None:
        base = f"{prefix}:{{{service}}}"
        self._base = base
        self.all_of_it = f"{base}:*"  # a pattern
        self.demand = f"{base}:demand"
        self.identity = f"{base}:identity"
        self.replicas = f"{base}:replicas"
        self.leases = f"{base}:leases"
        self.sequences = f"{base}:sequences"
        self.routers = f"{base}:routers"
        self.reserved = f"{base}:reserved"
        self.pending = (f"{base}:pending:0", f"{base}:pending:1")

    def heartbeat(self, replica_id: str) -> str:
        return f"{self._base}:heartbeat:{replica_id}"

    def tree(self, tier: str, generation: str) -> str:
        return f"{self._base}:{tier}:{generation}"

    def load(self, generation: str) -> str:
        return f"{self._base}:load:{generation}"

    def snapshot(self, tier: str, generation: str) -> str:
        return f"{self._base}:snapshot:{tier}:{generation}"

    def of_service(self) -> list[str]:
        """Every key that dies with the service's last generation, the leases first."""
        names = (self.leases, self.identity, self.replicas, self.sequences, self.routers)
        return [*names, self.reserved, *self.pending]

    def of_generation(self, generation: str) -> list[str]:
        """Every key that dies with a generation."""
        return [
            *(self.tree(tier, generation) for tier in TIERS),
            *(self.snapshot(tier, generation) for tier in TIERS),
            self.load(generation),
        ]
