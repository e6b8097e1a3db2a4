"""What separates the namespaces of a cluster: keys of their own, and their own part of Redis.

Keys of a namespace are derived from the installation's root key, which only the operator and the
shared router hold: they need no list, and no namespace can compute another's.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.model_table import SHARED, table_key

ROUTER = "_router"  # no namespace begins with an underscore
OPERATOR = "_operator"

# What routers and workers send to Redis, beside what their scripts call there. Nothing of it lists
# keys, reads other connections or changes the server.
_COMMANDS = (
    "dbsize", "evalsha", "exists", "get", "hdel", "hexists", "hget", "hgetall", "hlen", "hmget",
    "hset", "info", "persist", "pexpire", "pexpireat", "ping", "rename", "sadd", "script|load",
    "select", "set", "sismember", "smembers", "srem", "time", "unlink", "zadd", "zrangebyscore",
    "zrem",
)  # fmt: skip


def derive(root_key: str, purpose: str, namespace: str) -> str:
    """A key for one purpose in one namespace."""
    message = f"radixgrove\0{purpose}\0{namespace}".encode()
    digest = hmac.new(root_key.encode(), message, sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True)
class NamespaceKeys:
    """What the pods of one namespace hold."""

    internal_key: str
    cluster_secret: str
    management_key: str

    @classmethod
    def of(cls, root_key: str, namespace: str) -> NamespaceKeys:
        return cls(
            internal_key=derive(root_key, "internal", namespace),
            cluster_secret=derive(root_key, "blocks", namespace),
            management_key=derive(root_key, "management", namespace),
        )


# ---- users of Redis ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RedisUser:
    """A user of Redis, and its rules in the words of `ACL SETUSER`."""

    name: str
    password: str
    rules: tuple[str, ...]

    @property
    def all_rules(self) -> tuple[str, ...]:
        """From nothing: what the user may, and no more."""
        hashed = sha256(self.password.encode()).hexdigest()
        return ("reset", "on", f"#{hashed}", *self.rules)

    @property
    def acl_line(self) -> str:
        """As in an ACL file, where every user begins with nothing."""
        return " ".join(["user", self.name, *self.all_rules[1:]])


def user_name(prefix: str, who: str) -> str:
    """`who`: a namespace, `ROUTER` or `OPERATOR`. A namespace has no dot in it."""
    return f"{prefix}.{who}"


def redis_users(
    root_key: str, prefix: str, services: Mapping[str, Iterable[str]], *, read_only: bool = True
) -> list[RedisUser]:
    """Only the operator writes model tables; the shared router may reach every service's keys, a
    namespace those of its own services and nothing that it shares with others.

    Args:
        services: names in Redis, by namespace.
        read_only: whether Redis knows keys that may only be read (from 7.0 on). Before, a router
            may write the table that it goes by itself, and no other.
    """

    def user(who: str, *rules: str) -> RedisUser:
        return RedisUser(user_name(prefix, who), derive(root_key, "redis", who), rules)

    commands = tuple(f"+{command}" for command in _COMMANDS)
    reads = "%R~" if read_only else "~"
    router = (
        f"~{services_key(prefix)}", f"~{prefix}:router:*", f"~{prefix}:{{*}}:*",
        f"{reads}{table_key(prefix, SHARED)}",
    )  # fmt: skip
    users = [user(OPERATOR, "~*", "&*", "+@all"), user(ROUTER, *router, *commands)]
    for namespace, names in sorted(services.items()):
        keys = []
        for name in sorted(names):
            keys += [f"~{ServiceKeys(prefix, name).all_of_it}", f"{reads}{table_key(prefix, name)}"]
        users.append(user(namespace, *keys, *commands))
    return users
