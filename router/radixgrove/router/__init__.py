"""The router: it places requests on replicas, and passes on what they answer.

The names below may be used by other programs; the rest of the package may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixgrove.protocol.lazy import exports

if TYPE_CHECKING:
    from radixgrove.router.fleet import Fleet as Fleet
    from radixgrove.router.main import run as run
    from radixgrove.router.placement import Placement as Placement
    from radixgrove.router.placement import PlacementRequest as PlacementRequest
    from radixgrove.router.placement import Placer as Placer
    from radixgrove.router.proxy import Proxy as Proxy
    from radixgrove.router.server import RouterProcess as RouterProcess

_HOMES = {
    "fleet": ["Fleet"],
    "main": ["run"],
    "placement": ["Placement", "PlacementRequest", "Placer"],
    "proxy": ["Proxy"],
    "server": ["RouterProcess"],
}

__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = exports(__name__, _HOMES)
