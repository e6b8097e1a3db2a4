"""Times in Kubernetes objects are RFC 3339 strings; inside the operator they are Unix seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def to_text(when: float) -> str:
    moment = datetime.fromtimestamp(when, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_seconds_text(when: float) -> str:
    """In whole seconds, as conditions and Events have them."""
    return to_text(float(int(when))).replace(".000Z", "Z")


def from_text(text: str | None) -> float | None:
    """None for an absent or malformed time: people edit annotations."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
