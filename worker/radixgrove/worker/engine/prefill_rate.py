"""How many tokens of prompts the engine computes a second, measured as it runs."""

from __future__ import annotations

_MEMORY = 0.9  # decay a step: steps before a new one count for so much


class PrefillRate:
    """Average over recent steps. Steps with fewer than half of `max_step_tokens` in chunks are left
    out: decoding rows make up more of their time."""

    def __init__(self, max_step_tokens: int) -> None:
        self._least = max_step_tokens / 2
        self._tokens = self._seconds = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """Take in a step that took `seconds` and computed `tokens` tokens of prompts."""
        if tokens >= self._least and seconds > 0:
            self._tokens = _MEMORY * self._tokens + tokens
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step that counts."""
        return self._tokens / self._seconds if self._seconds else 0.0
