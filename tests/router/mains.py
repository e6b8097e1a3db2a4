"""Mains of routers that wait less than real ones. A fork has loaded all that this imports."""

from __future__ import annotations

from radixgrove.router import janitor, registered
from radixgrove.router.__main__ import main


def busy_main(arguments: list[str]) -> None:
    """Looks ten times as often for what the dead left in Redis."""
    janitor.JANITOR_SECONDS = 0.5
    main(arguments)


def forgetful_main(arguments: list[str]) -> None:
    """Forgets replicas a second after Redis has lost them."""
    registered.REMEMBER_SECONDS = 1.0
    busy_main(arguments)
