"""How fast prompts are computed, as the engine runs."""

from __future__ import annotations

_MEMORY = 0.9  # weight of all steps before, beside a new one


class PrefillRate:
    """Of steps that are at least half prefill: others say more of their decodes."""

    def __init__(self, max_step_tokens: int) -> None:
        self._least = max_step_tokens / 2
        self._tokens = self._seconds = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """A step took so long, and prefilled so many tokens."""
        if tokens >= self._least and seconds > 0:
            self._tokens = _MEMORY * self._tokens + tokens
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """0: there was no such step yet."""
        return self._tokens / self._seconds if self._seconds else 0.0
