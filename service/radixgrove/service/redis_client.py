"""Redis for callers in threads: redis-py's client, by the rules of `redis_rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import redis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError

from radixgrove.service.redis_rules import RedisUnavailable

T = TypeVar("T")


def connect(url: str, timeout: float) -> redis.Redis:
    """A client of which every call has a timeout. Raises ValueError for a malformed URL."""
    return redis.Redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, health_check_interval=30
    )


def ask(client: redis.Redis, call: Callable[[], T]) -> T:
    """What `call`, which asks `client`, returns.

    Raises:
        RedisUnavailable: Redis did not answer, or refused; the text names the kind of error.
    """
    try:
        return call()
    except redis.RedisError as error:
        if isinstance(error, ReadOnlyError | BusyLoadingError | MasterDownError):
            # The address may lead to another server now: redis-py would keep its connections.
            client.connection_pool.disconnect()
        raise RedisUnavailable(type(error).__name__) from error
