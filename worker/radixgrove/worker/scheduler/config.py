"""The scheduler's part of the worker's settings, with defaults resolved."""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.protocol.settings import (
    EvictionPolicy,
    HostWritePolicy,
    SchedulePolicy,
    WorkerSettings,
)
from radixgrove.worker.plan import ExecutorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    num_pages: int
    page_size: int
    max_rows: int  # rows of the device's table
    max_running: int  # at most max_rows
    max_model_len: int  # prompt + output
    max_step_tokens: int
    max_step_seconds: float | None = None  # of a step with decodes, as far as prefill makes it
    vocab_size: int
    max_row_tokens: int = 1  # most tokens that a step yields a row
    micro_batches: int = 1
    run_ahead: bool = False  # of micro-batches: a row may start its next step before the token
    # of the last one has reached the host
    namespace: str = ""
    watermark: float = 0.02
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    eviction_policy: EvictionPolicy = EvictionPolicy.LRU
    prefix_cache: bool = True
    num_host_pages: int = 0  # of the second tier; 0: there is none
    num_window_pages: int = 0  # 0: pages have none, layers with a window keep all pages
    window: int = 0  # tokens of the longest; 0: no layer has one
    host_write_policy: HostWritePolicy = HostWritePolicy.WRITE_THROUGH
    # Tokens a second; what a load saves and costs. A rate of 0 is not known.
    prefill_rate: float = 0.0
    host_rate: float = 0.0
    max_queued: int = 1024
    max_queued_tokens: int = 4 << 20
    queue_timeout: float = 120.0
    grammar_timeout: float = 2.0
    grammar_threads: int | None = None
    grammar_jump: int = 0  # fewest tokens of a text that comes at once; 0: none does

    def __post_init__(self) -> None:
        """Raises ValueError when a request could be admitted that can never finish."""
        if self.max_model_len > self.num_pages * self.page_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the pool of "
                f"{self.num_pages * self.page_size} tokens"
            )
        if not 1 <= self.max_running <= self.max_rows or self.max_step_tokens < 1:
            raise ValueError("a step must hold at least one row and one token")
        if self.num_window_pages and self.window < 1:
            raise ValueError("window pages are for layers with a window")
        if self.num_window_pages and self.num_host_pages:
            raise ValueError("window pages are not copied to the host: a pool has them, or a host")
        if self.max_row_tokens < 1 or self.micro_batches < 1:
            raise ValueError("a row must get a token, and rows be in one batch, at least")

    @classmethod
    def resolve(
        cls,
        settings: WorkerSettings,
        info: ExecutorInfo,
        *,
        on_cpu: bool,
        namespace: str = "",
        prefill_rate: float = 0.0,
        host_rate: float = 0.0,
    ) -> SchedulerConfig:
        """Combine what was set with what the device has, and what it was measured to do."""
        return cls(
            num_pages=info.num_pages,
            page_size=info.page_size,
            max_rows=info.max_rows,
            max_running=min(settings.max_running or info.max_rows, info.max_rows),
            # The KV of a sequence's last token is never needed, but one sequence must fit alone.
            max_model_len=min(info.max_model_len, info.num_pages * info.page_size),
            max_step_tokens=settings.step_limits(on_cpu=on_cpu).max_step_tokens,
            max_step_seconds=_max_step_seconds(settings),
            vocab_size=info.vocab_size,
            max_row_tokens=info.max_row_tokens,
            micro_batches=info.micro_batches,
            run_ahead=info.run_ahead,
            namespace=namespace,
            watermark=settings.watermark,
            schedule_policy=settings.schedule_policy,
            eviction_policy=settings.eviction_policy,
            prefix_cache=settings.prefix_cache,
            num_host_pages=info.num_host_pages,
            num_window_pages=info.num_window_pages,
            window=info.window,
            host_write_policy=settings.host_write_policy,
            prefill_rate=prefill_rate,
            host_rate=host_rate,
            max_queued=settings.max_queued,
            max_queued_tokens=settings.max_queued_tokens,
            queue_timeout=settings.queue_timeout,
            grammar_timeout=settings.grammar_timeout,
            grammar_threads=settings.grammar_threads,
            grammar_jump=settings.grammar_jump,
        )


def _max_step_seconds(settings: WorkerSettings) -> float | None:
    """None: no bound, also for the batch jobs of `LONGEST_OUTPUT`: a bound shortens the time
    between two tokens of a stream, and lengthens the job."""
    if settings.max_step_ms is None or settings.schedule_policy is SchedulePolicy.LONGEST_OUTPUT:
        return None
    return settings.max_step_ms / 1000
