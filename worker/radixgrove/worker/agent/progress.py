"""What a starting worker tells people: its phases, its memory arithmetic, its address."""

from __future__ import annotations

import logging
import time

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport

_REPORT_SECONDS = 5.0
_REPORT_FRACTION = 0.1


class StartReport:
    """Phases as plain lines: one when a phase begins, then every 10 % or 5 s."""

    def __init__(self, log: logging.Logger, name: str = "") -> None:
        """
        Args:
            name: stands before each phase.
        """
        self._log = log
        self._name = name
        self._state: EngineState | None = None
        self._message = ""
        self._at = 0.0
        self._fraction = 0.0

    def phase(self, report: PhaseReport) -> None:
        now = time.monotonic()
        fraction = report.fraction or 0.0
        news = report.state is not self._state or report.message != self._message
        if not news and fraction < 1.0:
            due = now - self._at >= _REPORT_SECONDS
            if not due and fraction - self._fraction < _REPORT_FRACTION:
                return
        share = "" if report.fraction is None else f" {report.fraction:.0%}"
        self._log.info("start: %s%s%s: %s", self._name, report.state, share, report.message)
        self._state, self._message = report.state, report.message
        self._at, self._fraction = now, fraction


def ready_line(settings: WorkerSettings, seconds: float) -> str:
    members = f" with {settings.dp} members" if settings.dp > 1 else ""
    names = ", ".join(settings.served_model_name)
    return (
        f"ready after {seconds:.1f} s: {settings.replica_id} serves {names} at "
        f"{settings.advertise_url}{members}"
    )


def memory_arithmetic(info: EngineInfo) -> list[str]:
    """Where the memory goes and how many requests fit, in lines for people."""
    tokens = info.num_pages * info.page_size
    longest = info.max_model_len
    typical = min(longest, 1024)
    lines = [
        f"memory: weights {size(info.weights_bytes)} ({info.dtype} on {info.device})",
        f"memory: KV cache {size(_kv_bytes(info))}: {info.num_pages} pages of "
        f"{info.page_size} tokens = {tokens} tokens, {size(info.kv_bytes_per_token)} a token "
        f"({info.kv_dtype or info.dtype}){_within_windows(info)}",
        f"memory: room for {fitting(info, longest)} requests of {longest} tokens at once, "
        f"{fitting(info, typical)} of {typical}; batches of up to {info.max_running}",
    ]
    if info.host_pages:
        kept = info.host_pages * info.page_size
        lines.append(
            f"memory: host tier {size(kept * info.kv_bytes_per_token)}: {info.host_pages} pages = "
            f"{kept} tokens, brought back at {info.host_tokens_per_second:.0f} tokens/s"
        )
    return lines


def _kv_bytes(info: EngineInfo) -> int:
    windowed, pages = info.window_bytes_per_token, info.num_window_pages or info.num_pages
    others = info.kv_bytes_per_token - windowed
    return info.page_size * (info.num_pages * others + pages * windowed)


def _within_windows(info: EngineInfo) -> str:
    if not info.num_window_pages:
        return ""
    kept = info.num_window_pages * info.page_size
    return f", {size(info.window_bytes_per_token)} of it within windows alone, for {kept} tokens"


def fitting(info: EngineInfo, tokens: int) -> int:
    """How many requests of that many tokens the KV cache holds at once."""
    pages = -(-tokens // info.page_size)
    most = info.num_pages // pages
    # Window pages are reckoned for the rows of a batch.
    return min(most, info.max_running) if info.num_window_pages else most


def size(count: float) -> str:
    """Bytes for people: `538 MiB`, `22.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
