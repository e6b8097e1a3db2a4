"""Redis for callers in threads: redis-py's client, by the rules of `redis_rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import redis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError

from radixgrove.service.redis_rules import RedisUnavailable

T = TypeVar("T")


class WrongType(RedisUnavailable):
    """One key holds what it should not: that says nothing of the others."""


def connect(url: str, timeout: float) -> redis.Redis:
    """A client of which every call has a timeout. Raises ValueError for a malformed URL."""
    return redis.Redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, health_check_interval=30
    )


def ask(client: redis.Redis, call: Callable[[], T]) -> T:
    """What `call`, which asks `client`, returns.

    Raises:
        WrongType: a key has another type than the call needs.
        RedisUnavailable: Redis did not answer, or refused; the text names the kind of error.
    """
    try:
        return call()
    except redis.RedisError as error:
        if isinstance(error, ReadOnlyError | BusyLoadingError | MasterDownError):
            # The address may lead to another server now: redis-py would keep its connections.
            client.connection_pool.disconnect()
        if "WRONGTYPE" in str(error):
            raise WrongType("a key has the wrong type") from error
        raise RedisUnavailable(type(error).__name__) from error
