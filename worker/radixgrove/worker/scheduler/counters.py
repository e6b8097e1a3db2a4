"""What a scheduler counts over its life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Each only grows. Tokens of a request's prompt are counted at its first admission."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0  # brought back from the host for a request
    window_lost_tokens: int = 0  # cached, but computed anew: the window before them had gone
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
