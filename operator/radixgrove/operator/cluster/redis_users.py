"""Keeps the users of Redis: one for each namespace, with the keys of its services and no others.

They are set while Redis runs. The chart's own Redis also reads them from the keys' Secret when it
starts; any other that forgets them is given them again within seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any

import redis

from radixgrove.operator.api.config import RedisSettings
from radixgrove.operator.kube.keys import REDIS_PASSWORD, ROOT_KEY, Keys
from radixgrove.protocol.tenancy import RedisUser, redis_users
from radixgrove.service.redis_client import ask
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)


class UsersRefused(RedisUnavailable):
    """This Redis allows no users to be made; the text says what to do."""


class RedisUsers:
    """Thread-safe."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: RedisSettings) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._lock = threading.Lock()
        self._applied = ""  # mark of the users that Redis was last given

    def ensure(self, services: Mapping[str, Collection[str]]) -> None:
        """As `keep`, unless they were given to Redis before."""
        if self._mark(self._users(services)) != self._applied:
            self.keep(services)

    def keep(self, services: Mapping[str, Collection[str]]) -> None:
        """`services`: names in Redis, by namespace. Raises RedisUnavailable, KubeError."""
        with self._lock:
            users = self._users(services)
            mark = self._mark(users)
            if self._settings.own:
                self._keys.put_redis_users(self._acl(users))
            if self._settings.users and not self._has(users, mark):
                self._set(self._as_known(services), mark)
            self._applied = mark

    def _users(
        self, services: Mapping[str, Collection[str]], *, read_only: bool = True
    ) -> list[RedisUser]:
        if not self._settings.users:
            return []
        root_key, prefix = self._keys.ensure()[ROOT_KEY], self._settings.prefix
        return redis_users(root_key, prefix, services, read_only=read_only)

    def _as_known(self, services: Mapping[str, Collection[str]]) -> list[RedisUser]:
        """In the words of this Redis's version."""
        version = str(self._call("INFO", "server")["redis_version"])
        major = int(version.partition(".")[0])
        return self._users(services, read_only=major >= 7)

    def _mark(self, users: list[RedisUser]) -> str:
        return sha256(self._acl(users).encode()).hexdigest()

    def _acl(self, users: list[RedisUser]) -> str:
        """The chart's Redis has no other users: without the default one it would let all in."""
        lines = [f"user default {' '.join(self._default())}", *(user.acl_line for user in users)]
        return "\n".join(lines) + "\n"

    def _default(self) -> tuple[str, ...]:
        """ACL rules of Redis's default user, for clients that still use the one shared password."""
        if self._settings.users and self._keys.changed_over:
            return ("off",)
        hashed = sha256(self._keys.ensure()[REDIS_PASSWORD].encode()).hexdigest()
        return ("on", f"#{hashed}", "~*", "&*", "+@all")

    def _has(self, users: list[RedisUser], mark: str) -> bool:
        """Redis may have lost users and kept its data, or the reverse."""
        there = {_text(name) for name in self._call("ACL", "USERS")}
        known = {user.name for user in users} <= there
        return known and bool(self._call("GET", self._key) == mark.encode())

    def _set(self, users: list[RedisUser], mark: str) -> None:
        for user in users:
            self._call("ACL", "SETUSER", user.name, *user.all_rules)
        if self._settings.own:
            self._call("ACL", "SETUSER", "default", "reset", *self._default())
        known = {user.name for user in users}
        there = {_text(name) for name in self._call("ACL", "USERS")}
        prefix = self._settings.prefix
        gone = [name for name in there - known if name.rpartition(".")[0] == prefix]
        if gone:
            self._call("ACL", "DELUSER", *gone)
        self._call("SET", self._key, mark)

    @property
    def _key(self) -> str:
        return f"{self._settings.prefix}:users"

    def _call(self, *command: str) -> Any:
        def call() -> Any:
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]

        try:
            return ask(self._client, call)
        except RedisUnavailable as error:
            if isinstance(error.__cause__, redis.ResponseError):
                raise UsersRefused(
                    f"Redis refuses {' '.join(command[:2])} ({error.__cause__}): where it allows "
                    "no users, set redis.users to false in the chart"
                ) from error
            raise


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
