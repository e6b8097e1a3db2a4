"""The skeleton of one process: HTTP, keys, logs, supervision, and the way to Redis.

The names below may be used by other programs; the rest of the package may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixgrove.protocol.lazy import exports

if TYPE_CHECKING:
    from radixgrove.service.api import Api as Api
    from radixgrove.service.api import reply as reply
    from radixgrove.service.auth import ApiKeys as ApiKeys
    from radixgrove.service.cluster_directory import BlockingDirectory as BlockingDirectory
    from radixgrove.service.cluster_directory import ClusterDirectory as ClusterDirectory
    from radixgrove.service.cluster_directory import ServiceRecord as ServiceRecord
    from radixgrove.service.directories import private_directory as private_directory
    from radixgrove.service.management import ManagementApi as ManagementApi
    from radixgrove.service.redis_link import RedisLink as RedisLink
    from radixgrove.service.redis_rules import RedisRefused as RedisRefused
    from radixgrove.service.redis_rules import RedisUnavailable as RedisUnavailable
    from radixgrove.service.server import Server as Server
    from radixgrove.service.supervisor import ChildFailed as ChildFailed
    from radixgrove.service.supervisor import Supervised as Supervised

_HOMES = {
    "api": ["Api", "reply"],
    "auth": ["ApiKeys"],
    "cluster_directory": ["BlockingDirectory", "ClusterDirectory", "ServiceRecord"],
    "directories": ["private_directory"],
    "management": ["ManagementApi"],
    "redis_link": ["RedisLink"],
    "redis_rules": ["RedisRefused", "RedisUnavailable"],
    "server": ["Server"],
    "supervisor": ["ChildFailed", "Supervised"],
}

__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = exports(__name__, _HOMES)
