"""Which operations on the device have been launched, and which of them have ended.

Steps, saves (device to host) and loads (host to device) are three sequences, each numbered from 1
and ending in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Fence(NamedTuple):
    """Everything that may still touch a page: each sequence up to this number. 0: none of it."""

    step: int = 0
    save: int = 0
    load: int = 0


@dataclass(slots=True)
class Timeline:
    launched: int = 0  # steps
    collected: int = 0
    saves_launched: int = 0
    saves_ended: int = 0
    loads_launched: int = 0
    loads_ended: int = 0

    @property
    def in_flight(self) -> int:
        """Steps in flight."""
        return self.launched - self.collected

    @property
    def copies_in_flight(self) -> int:
        return self.saves_launched - self.saves_ended + self.loads_launched - self.loads_ended

    def passed(self, fence: Fence) -> bool:
        return (
            fence.step <= self.collected
            and fence.save <= self.saves_ended
            and fence.load <= self.loads_ended
        )
