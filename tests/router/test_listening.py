"""Where a router listens."""

from __future__ import annotations

import pytest

from radixgrove.router.listening import StartError, listen


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0, shared=False) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port, shared=True)
