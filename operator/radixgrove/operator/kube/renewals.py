"""Whether Leases are renewed, by this machine's clock alone.

What another machine wrote as the time of a renewal is only compared with what it wrote before.
"""

from __future__ import annotations

import threading
import time

from radixgrove.operator.api.objects import LeaseSpec


class Renewals:
    """Of several Leases. Thread-safe."""

    def __init__(self, duration: float) -> None:
        """`duration`: seconds, of Leases that do not say their own."""
        self._duration = duration
        self._lock = threading.Lock()
        # Holder and time of renewal, and when they were first seen.
        self._seen: dict[str, tuple[tuple[str, str], float]] = {}

    def are_overdue(self, lease: str, spec: LeaseSpec) -> bool:
        """Whether nothing has changed for the whole of its duration; `lease` tells it from others.

        One that is looked at for the first time counts from now on.
        """
        mark = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        now = time.monotonic()
        with self._lock:
            before = self._seen.get(lease)
            if before is None or before[0] != mark:
                self._seen[lease] = before = (mark, now)
        return now - before[1] > (spec.get("leaseDurationSeconds") or self._duration)
