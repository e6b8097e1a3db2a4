"""Who may use the API of router and worker."""

from __future__ import annotations

from radixgrove.protocol.envelope import INTERNAL_KEY_HEADER
from radixgrove.service.asgi import App, Receive, Scope, Send, header, state
from radixgrove.service.auth import PUBLIC_PATHS, ApiKeys, may_scrape, same_secret

# Keys of `scope["state"]`.
PRINCIPAL = "principal"  # absent where the internal or the management key was enough
INTERNAL = "internal"  # whether the internal key was given


class Guard:
    """Deny by default: every path but the public ones needs an API key or the internal key.

    The management key opens `/metrics`, and so does the metrics key, which opens nothing else.
    """

    def __init__(
        self,
        app: App,
        keys: ApiKeys,
        *,
        management_key: str | None,
        metrics_key: str | None = None,
        internal_key: str | None = None,
    ) -> None:
        """`internal_key`: None: routers are clients like others."""
        self._app = app
        self._keys = keys
        self._scrape_keys = (management_key, metrics_key)
        self._internal_key = internal_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            ApiError: 401.
        """
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            context = state(scope)
            if self._internal_key is not None:
                given = header(scope, INTERNAL_KEY_HEADER)
                context[INTERNAL] = same_secret(given, self._internal_key)
            authorization = header(scope, "authorization")
            scrapes = may_scrape(scope["path"], authorization, self._scrape_keys)
            if not context.get(INTERNAL) and not scrapes:
                context[PRINCIPAL] = self._keys.authenticate(authorization)
        await self._app(scope, receive, send)
