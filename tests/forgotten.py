"""Tasks that a test leaves behind, and that complain when they are collected as garbage.

That may be in the middle of any later test of the process. Python 3.11 fails to parse what that
test parses then: the complaint formats a traceback, and so parses too.
"""

from __future__ import annotations

import asyncio
from typing import Any


def forgotten_tasks() -> list[str]:
    """Tasks of closed event loops that have not ended, or failed unheard; each is named once."""
    found = []
    for task in _tasks():
        if not task.get_loop().is_closed():
            continue  # what failed there may still be asked for
        if not task.done() and task._log_destroy_pending:  # type: ignore[attr-defined]
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            found.append(repr(task))
        elif task.done() and task._log_traceback:  # type: ignore[attr-defined]
            task._log_traceback = False  # type: ignore[attr-defined]
            found.append(repr(task))
    return found


def _tasks() -> list[asyncio.Task[Any]]:
    """All that have not been collected, of every event loop."""
    # Since Python 3.12 it is the other name.
    known = getattr(asyncio.tasks, "_all_tasks", None)
    known = asyncio.tasks._scheduled_tasks if known is None else known  # type: ignore[attr-defined]
    while True:
        try:
            return list(known)
        except RuntimeError:  # another thread's loop has made one meanwhile
            continue
