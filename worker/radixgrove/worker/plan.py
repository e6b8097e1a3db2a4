"""The contract between the scheduler, which decides, and the execution, which computes.

The scheduler never sees a tensor; the execution never sees a request. A *row* is a slot of the
device's request table: its tokens (`rows x max_model_len` int32), its page table and its sampling
state live on the device from `NewRow` until the row is named in `freed_rows`. Plans carry only what
changed. The same plan, as msgpack, drives every rank of a group.

Steps in flight: the scheduler may plan step N+1 before it has the results of N. A row's position is
still exact (a decode adds one token); what it cannot know is that step N ended the row, in which
case it discards the token of N+1. Whatever a step may read or write (rows, pages) is not reused
until that step has been collected.

Copies between the device's pages and the host's run beside the steps, saves and loads each in the
order of their ids. Rank 0 alone sees when they end; `saved`, `loaded` and `collected` tell the
others what it relied on, and each rank makes whatever comes after wait for the same on its device.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.messages import TokenLogprobs


class NewRow(msgspec.Struct, kw_only=True):
    """A request enters a row, for the first time or again after a preemption."""

    row: int
    token_ids: bytes  # int32 LE: prompt and, after a preemption, what was generated so far
    prompt_len: int  # how many of them are prompt: penalties and `min_tokens` count the others
    pages: list[int]  # pages of the cached prefix, in order
    sampling: SamplingParams


class PrefillChunk(msgspec.Struct, array_like=True):
    """Compute tokens [start, start + length) of a row; KV of [0, start) is in its pages.

    `sample`: the chunk ends the row's known tokens, so its last position yields the next token.
    """

    row: int
    start: int
    length: int
    sample: bool


class PageCopies(msgspec.Struct, array_like=True):
    """One operation between the device's pages and the host's, page by page.

    Saves and loads have ids of their own, each counting up from 1.
    """

    copy_id: int
    pages: list[int]  # of the device
    host_pages: list[int]  # as many
    after: int = 0  # of a load: the last save that wrote any of its host pages


class StepPlan(msgspec.Struct, kw_only=True):
    """One forward pass over prefill chunks and decodes together.

    Applied in this order: `freed_rows`, `new_rows`, `appended_pages`, then the forward. A decode
    row computes exactly one token, the last one its table holds (the previous step's sample, which
    may not have reached the host yet), and samples the next. `decodes` keeps its order from step to
    step where it can, so that the device reuses its inputs.
    """

    step_id: int
    freed_rows: list[int] = []
    new_rows: list[NewRow] = []
    appended_pages: list[tuple[int, int]] = []  # (row, page), in table order
    prefills: list[PrefillChunk] = []
    decodes: list[int] = []
    saves: list[PageCopies] = []  # device to host, of what collected steps have written
    loads: list[PageCopies] = []  # host to device
    # Rank 0 had seen the end of everything up to these when it planned; nobody may see less.
    collected: int = 0  # steps
    saved: int = 0
    loaded: int = 0
    awaited: int = 0  # this step reads what loads up to this one bring, layer by layer

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefills) + len(self.decodes)

    def sampled_rows(self) -> list[int]:
        """Rows that yield a token, in the order of `StepResult.tokens`."""
        return [chunk.row for chunk in self.prefills if chunk.sample] + self.decodes


class StepResult(msgspec.Struct, kw_only=True):
    """What a step sampled: `tokens` in the order of `StepPlan.sampled_rows()`.

    `counts` (speculation) says how many tokens each row got; None means one each. `logprobs` holds
    the rows that asked, a list as long as the row's tokens; `prompt_logprobs` maps a row to the
    logprobs of tokens start+1 .. start+length of its chunk (those that exist in the prompt).
    """

    step_id: int
    tokens: list[int]
    counts: list[int] | None = None
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler must know of the device; measured or derived at start."""

    num_pages: int  # pages 0 .. num_pages - 1 are the scheduler's to give out
    page_size: int
    max_rows: int
    max_model_len: int
    vocab_size: int
    depth: int  # steps in flight: 1 synchronous, 2 overlapped
    num_host_pages: int = 0  # of the host tier, the scheduler's to give out as well


class Executor(Protocol):
    """Runs plans in order. One thread owns it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step. At most `info.depth` steps are launched and not yet collected."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step.

        Raises:
            RuntimeError: a rank died or the step failed as a whole; the engine must end.
        """
        ...

    def copies_ended(self) -> tuple[int, int]:
        """Ids of the last save and the last load that have ended here, with all before them.

        Never waits.
        """
        ...

    def close(self) -> None: ...
