"""What `radixgrove ps` and people see of the router."""

from __future__ import annotations

import time

import msgspec

from radixgrove.router.fleet import Fleet
from radixgrove.router.replicas import Replica, Service
from radixgrove.service.redis_link import RedisLink


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """One replica. Figures that only a registered replica reports are null for others."""

    replica: str
    group: str  # replicas of one group live and die together
    service: str
    model: str
    url: str
    kind: str  # "registered" or "static"
    state: str  # "ready", "draining", "broken" or "not-ready"
    generation: str
    generation_age: float | None  # seconds since the engine registered
    device: str
    running: int | None
    waiting: int | None
    waiting_tokens: int | None  # of their prompts, less what is cached
    in_flight: int  # through this router process
    kv_use: float | None  # share of KV pages held by running requests, 0..1
    hit_rate: float | None  # cached share of all prompt tokens, 0..1, from either tier
    host_use: float | None  # share of the host tier's pages that hold KV; null without a tier
    host_hit_rate: float | None  # share of all prompt tokens that came back from the host
    prompt_tokens: int | None
    cached_tokens: int | None


class RouterStatus(msgspec.Struct, kw_only=True):
    router: str
    redis: str  # "up", "off", or why it is not used
    policy: str
    in_flight: int
    replicas: list[ReplicaStatus]


def router_status(
    router_id: str, policy: str, fleet: Fleet, link: RedisLink | None, in_flight: int
) -> RouterStatus:
    redis = "off" if link is None else "up" if link.up else link.problem
    return RouterStatus(
        router=router_id,
        redis=redis,
        policy=policy,
        in_flight=in_flight,
        replicas=[
            _replica(service, replica)
            for service in sorted(fleet.services, key=lambda service: service.name)
            for replica in sorted(service.replicas.values(), key=lambda replica: replica.id)
        ],
    )


def _replica(service: Service, replica: Replica) -> ReplicaStatus:
    report = replica.lease.report if replica.lease is not None else None
    registration = replica.registration
    status = ReplicaStatus(
        replica=replica.id,
        group=replica.group,
        service=service.name,
        model=service.model,
        url=replica.url,
        kind="static" if registration is None else "registered",
        state=replica.state,
        generation=replica.generation,
        generation_age=None,
        device=registration.engine.device if registration is not None else "",
        running=None,
        waiting=None,
        waiting_tokens=None,
        in_flight=replica.in_flight,
        kv_use=None,
        hit_rate=None,
        host_use=None,
        host_hit_rate=None,
        prompt_tokens=None,
        cached_tokens=None,
    )
    if report is None:
        return status
    status.running, status.waiting = report.running, report.waiting
    status.waiting_tokens = report.waiting_tokens
    status.prompt_tokens, status.cached_tokens = report.prompt_tokens, report.cached_tokens
    if report.started_ms:
        status.generation_age = max(0.0, time.time() - report.started_ms / 1000)
    if report.pages_total:
        status.kv_use = 1 - report.pages_free / report.pages_total
    if report.prompt_tokens:
        status.hit_rate = report.cached_tokens / report.prompt_tokens
    measured = replica.measured
    if measured is not None and measured.host_pages_total:
        status.host_use = measured.host_pages_used / measured.host_pages_total
        if report.prompt_tokens:
            status.host_hit_rate = measured.host_cached_tokens / report.prompt_tokens
    return status
