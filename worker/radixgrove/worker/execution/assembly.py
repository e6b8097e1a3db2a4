"""A loaded model, and runners made of it: on a small pool for the trial, then on the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixgrove.protocol.model.config import ModelConfig
from radixgrove.protocol.settings import AttentionChoice, WorkerSettings
from radixgrove.worker.attention.kv_pool import KvShape
from radixgrove.worker.execution.choices import Limits
from radixgrove.worker.execution.graphs import ladder
from radixgrove.worker.execution.memory import WindowSizing
from radixgrove.worker.execution.page_copier import page_copier
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.prefill_graphs import token_ladder
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.select_attention import select_attention
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.messages import EngineState, PhaseReport
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.parallel.member import Member
from radixgrove.worker.plan import ExecutorInfo

Report = Callable[[PhaseReport], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's model and all that is known before the pool is sized."""

    settings: WorkerSettings
    config: ModelConfig
    limits: Limits
    model: Decoder
    member: Member
    shape: KvShape
    memory: HostMemory | None  # of the host tier
    report: Report

    @property
    def host_pages(self) -> int:
        return 0 if self.memory is None else self.memory.bytes.nbytes // self.shape.page_bytes

    def say(self, state: EngineState, message: str, fraction: float | None = None) -> None:
        self.report(PhaseReport(state, message, fraction))

    @property
    def windows(self) -> WindowSizing | None:
        """What layers with a window keep; None: all pages."""
        return WindowSizing.of(self.settings, self.config, self.limits)

    def assemble(
        self,
        num_pages: int,
        num_window_pages: int,
        max_model_len: int,
        report: Report,
        memory: HostMemory | None,
    ) -> tuple[Runner, str]:
        """A runner on a pool of so many pages, and its attention backend's name.

        Args:
            num_window_pages: 0: layers with a window have all pages.
            memory: for its host tier; None: it has none.
        """
        settings, device = self.settings, self.model.device
        info = ExecutorInfo(
            num_pages=num_pages,
            page_size=settings.page_size,
            max_rows=self.limits.max_running,
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
            depth=self.limits.depth,
            micro_batches=self.limits.micro_batches,
            run_ahead=self.member.mail is not None,
            num_host_pages=0 if memory is None else self.host_pages,
            num_window_pages=num_window_pages,
            window=self.config.attention.window if self.config.attention.windowed else 0,
        )
        pool = self.shape.allocate(num_pages, device, num_window_pages)
        attention, name = select_attention(
            settings.attention_backend,
            pool,
            self.config,
            self.model.group.shard,
            self.model.dtype,
            report,
        )
        table = RequestTable(
            max_rows=info.max_rows,
            max_model_len=max_model_len,
            page_size=settings.page_size,
            scratch_page=num_pages,
            scratch_window_page=pool.num_window_pages or None,
            device=device,
        )
        host = None if memory is None else page_copier(pool, memory)
        timeout = self.limits.step_timeout
        return Runner(self.model, attention, table, info, timeout, host, self.member), name

    def graph_sizes(self, backend: str) -> tuple[list[int], list[int]]:
        """Batch sizes and token counts to capture: none on a CPU, or for a backend of varying
        shapes."""
        on_cuda = self.model.device.type == "cuda"
        if not on_cuda or not self.settings.cuda_graphs or backend == AttentionChoice.TORCH:
            return [], []
        return ladder(self.limits.max_running), token_ladder(self.limits.max_step_tokens)
