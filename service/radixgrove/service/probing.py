"""Asking a part on this machine whether it is ready."""

from __future__ import annotations

import http.client

_TIMEOUT = 2.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def local_address(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return _ANY_ADDRESS.get(host, host)


def is_ready(host: str, port: int) -> bool:
    """Whether what listens there answers `GET /readyz` with 200, within two seconds."""
    connection = http.client.HTTPConnection(local_address(host), port, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
