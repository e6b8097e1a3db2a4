"""The runner: executes step plans, keeping up to `depth` of them in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixgrove.worker.attention.base import AttentionBackend
from radixgrove.worker.execution.expert_load import ExpertLoad
from radixgrove.worker.execution.graphs import DecodeGraphs, Recorder
from radixgrove.worker.execution.inputs import step_inputs
from radixgrove.worker.execution.memory import cuda_shortage
from radixgrove.worker.execution.page_copier import PageCopier
from radixgrove.worker.execution.prefill_graphs import MixedGraphs
from radixgrove.worker.execution.sampling.logprobs import LogprobTensors, token_logprobs
from radixgrove.worker.execution.sampling.masks import MaskCopies, TokenMasks
from radixgrove.worker.execution.sampling.sampler import Sampled, Sampler
from radixgrove.worker.execution.sampling.state import SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import PinnedRing
from radixgrove.worker.messages import TokenLogprobs
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.parallel.member import Member
from radixgrove.worker.parallel.peer_memory import PeerMail
from radixgrove.worker.plan import ExecutorInfo, PrefillChunk, StepPlan, StepResult

T = TypeVar("T")

# Prompt positions with logits at the same time: bounds a float32 buffer of this many vocabularies.
_PROMPT_LOGITS = 256


@dataclass(slots=True)
class _PromptLogprobs:
    row: int
    width: int
    parts: list[LogprobTensors]


@dataclass(slots=True)
class _Forwarded:
    """A step with its logits computed, yet to be sampled."""

    plan: StepPlan
    # Takes the step's masks. None: nothing was computed, there are copies only.
    sample: Callable[[TokenMasks | None], Sampled] | None
    prompts: list[_PromptLogprobs]
    rows: Tensor | None = None  # [S] int64, those that are sampled on the last stage


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A step: samples of its rows are on their way from the last stage to this one's table.

    `mailed`: its number there; `launched`: how many steps were launched here before it.
    """

    plan: StepPlan
    mailed: int
    launched: int

    @property
    def rows(self) -> list[int]:
        return self.plan.sampled_rows()


@dataclass(slots=True)
class _InFlight:
    """A launched step: where its results will be on the host, and the event that says when."""

    plan: StepPlan
    samples: Tensor  # [S] on the host, or [N + S]: tokens and counts
    logprob_rows: list[int]
    logprob_widths: list[int]
    logprobs: LogprobTensors | None
    prompts: list[_PromptLogprobs]
    done: torch.cuda.Event | None

    @property
    def has_ended(self) -> bool:
        return self.done is None or self.done.query()  # type: ignore[no-untyped-call]


def _kept(items: list[T], bounds: list[int], counts: list[int]) -> list[list[T]]:
    """The first `counts[i]` items of each row i, of which `items` holds `bounds[i]`."""
    ends = accumulate(bounds)
    return [
        items[end - bound : end - bound + count]
        for end, bound, count in zip(ends, bounds, counts, strict=True)
    ]


class _ResultCopies:
    """Samples on their way to the host, on a stream of their own: the next step need not wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def fetch(self, samples: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Samples on the host once the event, which ends the step, has happened."""
        if not samples.numel():  # of a stage before the last
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
            return torch.empty_like(samples, device="cpu"), ended
        steps = torch.cuda.current_stream(samples.device)
        tokens = torch.empty_like(samples, device="cpu", pin_memory=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            tokens.copy_(samples, non_blocking=True)
            done.record()
        samples.record_stream(self._stream)
        self._last = done
        return tokens, done

    def await_last(self) -> None:
        """Let the current stream go on only after the last copy."""
        if self._last is not None:
            self._last.wait()


def _nothing() -> None:
    """On a CPU a step's samples are fetched when it ends."""


class Runner:
    """An `Executor` on one device, which may be one rank of several.

    Of a pipeline it computes a stage. The last stage alone samples; the others yield no tokens.
    They get them over peer memory, or else, of collected steps, by `take_back`, before they are to
    compute what follows them.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        table: RequestTable,
        info: ExecutorInfo,
        step_timeout: float,
        host: PageCopier | None = None,
        member: Member | None = None,
    ) -> None:
        if info.max_row_tokens > 1 and info.depth > 1:
            raise ValueError("attention plans by exact lengths, which steps in flight would hide")
        self._model = model
        self._member = member or Member()
        self._attention = attention
        self._table = table
        self._info = info
        self._step_timeout = step_timeout
        self._host = host
        self._device = model.device
        self._state = SamplingState(info.max_rows, model.device, model.known_tokens)
        self._sampler = Sampler(self._state, table)
        self._masks = MaskCopies(info.depth, model.device)
        self._recorder = Recorder(model.device)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._forwarded: _Forwarded | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._launched = 0  # steps
        self._mailed = 0  # the newest step's number in the mail
        self._awaited: deque[_Awaited] = deque()
        self._collected = 0  # steps
        self.expert_load: ExpertLoad | None = None
        if model.expert_load is not None:
            self.expert_load = ExpertLoad(model.expert_load)
        self._results = _ResultCopies(model.device) if model.device.type == "cuda" else None
        self._returned: PinnedRing | None = None  # to stages before the last
        if model.device.type == "cuda" and not self._member.is_last:
            # Of so many collected steps one was launched after the first of them was taken back.
            turns = info.depth + 2
            self._returned = PinnedRing(2 * info.max_rows, turns, model.device)

    def capture(self, sizes: list[int], report: Callable[[str, float], None]) -> DecodeGraphs:
        """From now on decode-only steps of up to the largest of `sizes` rows are replayed."""
        graphs = DecodeGraphs(
            self._model, self._attention, self._table, self._sampler, self._recorder, sizes
        )
        graphs.capture(report)
        self._graphs = graphs
        self.take_back([self._table.dummy_row], [0])  # so that its kernel is compiled
        return graphs

    def capture_mixed(self, sizes: list[int], report: Callable[[str, float], None]) -> MixedGraphs:
        """The same for steps with chunks, of up to the largest of `sizes` tokens.

        After `capture`: the attention backend has its buffers for the largest size of that.
        """
        mixed = MixedGraphs(
            self._model,
            self._attention,
            self._table,
            self._recorder,
            sizes,
            max_decodes=self._info.max_rows,
        )
        mixed.capture(report)
        self._mixed = mixed
        return mixed

    @property
    def member(self) -> Member:
        return self._member

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> None:
        """See `Executor.launch`. On a CPU the step is done on return."""
        self.forward(plan)
        self.sample()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """See `Executor.forward`."""
        if self._forwarded is not None:
            raise RuntimeError(f"step {self._forwarded.plan.step_id} is not sampled yet")
        if len(self._in_flight) >= self._info.depth:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight already")
        try:
            self._forwarded = self._compute(plan)
        except torch.cuda.OutOfMemoryError as error:
            raise self._out_of_memory(plan) from error

    def masks(self, count: int, words: int) -> NDArray[np.int32]:
        """See `Executor.masks`."""
        return self._masks.rows(count, words)

    @torch.inference_mode()
    def sample(self, masked: Sequence[int] = ()) -> None:
        """See `Executor.sample`."""
        step, self._forwarded = self._forwarded, None
        if step is None:
            raise RuntimeError("there is no step to sample")
        try:
            masks = self._masks.send(masked) if masked else None
            self._in_flight.append(self._finish(step, masks))
        except torch.cuda.OutOfMemoryError as error:
            raise self._out_of_memory(step.plan) from error

    def _out_of_memory(self, plan: StepPlan) -> RuntimeError:
        return RuntimeError(cuda_shortage(self._device, f"in a step of {plan.num_tokens} tokens"))

    def _compute(self, plan: StepPlan) -> _Forwarded:
        """Everything up to the logits that are sampled from."""
        if self._member.mail is not None:
            self._mailed = self._member.mail.next_step()
            self._take_mail(plan, self._member.mail)
        self._launched += 1
        self._table.apply(plan)
        if plan.new_rows:
            self._state.enter(plan.new_rows)
        whole = self._want_prompt_logprobs(plan.prefills)
        graphs = self._decode_graphs(plan)
        mixed = None if whole else self._mixed_graphs(plan)
        await_layer = None
        if self._host is not None:
            await_layer = self._host.launch(plan, by_layer=graphs is None and mixed is None)
        if not plan.num_tokens:
            return _Forwarded(plan, None, [])
        if graphs is not None:
            graphs.forward(plan.decodes, self._received(plan))
            if not self._member.is_last:
                return self._passed_on(plan, graphs.states(len(plan.decodes)).clone())
            fetched = self._results.await_last if self._results is not None else _nothing
            return _Forwarded(
                plan,
                lambda masks: graphs.sample(plan.decodes, fetched, masks),
                [],
                graphs.rows(len(plan.decodes)),
            )
        inputs = step_inputs(plan, self._table, self._device)
        wanted = inputs.sampled_tokens if self._member.is_last and not whole else None
        if mixed is not None:
            hidden = mixed.run(inputs, self._received(plan))
            hidden = hidden.clone() if wanted is None else hidden.index_select(0, wanted)
        else:
            self._attention.plan(inputs.batch)
            hidden = self._model.hidden_states(
                inputs.token_ids,
                inputs.batch,
                self._attention,
                wanted,
                self._received(plan),
                await_layer,
            )
        if not self._member.is_last:
            return self._passed_on(plan, hidden)
        prompts: list[_PromptLogprobs] = []
        if whole:
            prompts = self._prompt_logprobs(plan.prefills, hidden)
            hidden = hidden.index_select(0, inputs.sampled_tokens)
        rows = plan.sampled_rows()
        if not rows:
            return _Forwarded(plan, lambda _: Sampled(inputs.sampled_rows), prompts)
        logits, sampled = self._model.logits(hidden), inputs.sampled_rows
        return _Forwarded(
            plan, lambda masks: self._draw(plan, logits, sampled, masks), prompts, sampled
        )

    def _take_mail(self, plan: StepPlan, mail: PeerMail) -> None:
        """On a stage before the last: bring the table up to date with samples that the plan's rows
        go on from, and with those of steps that others may have the rows of by now."""
        decodes, awaited = set(plan.decodes), self._awaited
        needed = [index for index, step in enumerate(awaited) if not decodes.isdisjoint(step.rows)]
        count = needed[-1] + 1 if needed else 0
        while awaited:
            step = awaited[0]
            ended = step.plan.step_id <= plan.collected or step.launched < self._collected
            if count <= 0 and not ended:
                return
            mail.take(step.mailed, len(step.rows), self._table.history)
            awaited.popleft()
            count -= 1

    def _received(self, plan: StepPlan) -> Tensor | None:
        """What the stage before made of the step's tokens; None on the first."""
        if self._member.is_first:
            return None
        model = self._model
        links = self._member.links
        return links.receive(plan.num_tokens, model.config.hidden_size, model.dtype)

    def _passed_on(self, plan: StepPlan, hidden: Tensor) -> _Forwarded:
        """A step of a stage that is not the last: it needs no masks, and yields no tokens."""
        self._member.links.send(hidden)
        if self._member.mail is not None and plan.sampled_rows():
            self._awaited.append(_Awaited(plan, self._mailed, self._launched - 1))
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return _Forwarded(plan, lambda _: Sampled(nothing), [])

    @torch.inference_mode()
    def take_back(self, rows: list[int], tokens: list[int]) -> None:
        """Tokens that a collected step sampled, one for each of `rows`, in a stage before the last,
        where `launch` has only counted them."""
        if rows and not self._member.is_last:
            packed = rows + [max(token, 0) for token in tokens]
            ring = self._returned
            sent = torch.tensor(packed) if ring is None else ring.send(packed)
            self._table.append(sent[: len(rows)], sent[len(rows) :])

    def _draw(
        self, plan: StepPlan, logits: Tensor, rows: Tensor, masks: TokenMasks | None
    ) -> Sampled:
        sampler, host_rows = self._sampler, plan.sampled_rows()
        if plan.bounds:
            return sampler.sample_bounded(logits, rows, host_rows, plan.bounds, masks)
        return sampler.sample(logits, rows, host_rows, masks)

    def _decode_graphs(self, plan: StepPlan) -> DecodeGraphs | None:
        """Graphs that can replay the plan's step."""
        graphs = self._graphs
        simple = not plan.prefills and not plan.bounds
        return graphs if graphs is not None and simple and graphs.fits(plan.decodes) else None

    def _mixed_graphs(self, plan: StepPlan) -> MixedGraphs | None:
        return self._mixed if self._mixed is not None and self._mixed.fits(plan) else None

    def _want_prompt_logprobs(self, prefills: list[PrefillChunk]) -> bool:
        params = (self._state.params[chunk.row] for chunk in prefills)
        return any(p is not None and p.prompt_logprobs is not None for p in params)

    def _prompt_logprobs(self, chunks: list[PrefillChunk], hidden: Tensor) -> list[_PromptLogprobs]:
        found = []
        first = 0
        for chunk in chunks:
            params = self._state.params[chunk.row]
            if params is not None and params.prompt_logprobs is not None:
                # Position p's logits are about token p + 1; the last prompt token's are a sample.
                last = self._state.prompt_lens[chunk.row] - 1
                count = min(chunk.start + chunk.length, last) - chunk.start
                states = hidden[first : first + max(count, 0)]
                parts = self._prompt_parts(chunk, states, params.prompt_logprobs)
                found.append(_PromptLogprobs(chunk.row, params.prompt_logprobs, parts))
            first += chunk.length
        return found

    def _prompt_parts(
        self, chunk: PrefillChunk, states: Tensor, width: int
    ) -> list[LogprobTensors]:
        parts = []
        for begin in range(0, states.shape[0], _PROMPT_LOGITS):
            block = states[begin : begin + _PROMPT_LOGITS]
            start = chunk.start + 1 + begin
            targets = self._table.tokens[chunk.row, start : start + block.shape[0]].long()
            parts.append(token_logprobs(self._model.logits(block), targets, width).to_host())
        return parts

    def _finish(self, step: _Forwarded, masks: TokenMasks | None) -> _InFlight:
        plan = step.plan
        if step.sample is None:
            return _InFlight(plan, torch.empty(0, dtype=torch.int64), [], [], None, [], None)
        sampled = step.sample(masks)
        self._table.advance(plan.sampled_rows(), plan.bounds)
        if self._member.mail is not None and step.rows is not None:
            self._member.mail.post(self._mailed, step.rows, sampled.tokens)
        samples, logprobs = sampled.tokens, sampled.logprobs
        if sampled.counts is not None:
            samples = torch.cat([samples, sampled.counts])
        if logprobs is not None:
            logprobs = logprobs.to_host()
        done = None
        if self._results is None:
            samples = samples.clone()
        else:
            samples, done = self._results.fetch(samples)
            if self._host is not None:
                self._host.stepped(plan.step_id, done)
        rows = sampled.logprob_rows
        widths = [self._sampler.logprob_width(row) for row in rows]
        return _InFlight(plan, samples, rows, widths, logprobs, step.prompts, done)

    @property
    def in_flight(self) -> int:
        """Steps that were sampled and not collected."""
        return len(self._in_flight)

    @property
    def has_ended(self) -> bool:
        """Whether there is a step to collect, and without a wait."""
        return bool(self._in_flight) and self._in_flight[0].has_ended

    @property
    def steps_ended(self) -> int:
        """Since the start, those of the warm-up included; any thread may ask."""
        return self._collected + sum(step.has_ended for step in list(self._in_flight))

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        step = self._in_flight.popleft()
        self._collected += 1
        if step.done is not None:
            self._wait(step.done)
        bounds, samples = step.plan.bounds, step.samples.tolist()
        tokens, counts = samples, None
        if bounds:
            counts = samples[-len(bounds) :]
            tokens = [token for part in _kept(samples, bounds, counts) for token in part]
        return StepResult(
            step_id=step.plan.step_id,
            tokens=tokens,
            counts=counts,
            logprobs=self._token_logprobs(step, counts),
            prompt_logprobs={
                prompt.row: [
                    entry
                    for part in prompt.parts
                    for entry in part.entries([prompt.width] * part.chosen.shape[0])
                ]
                for prompt in step.prompts
            },
        )

    @staticmethod
    def _token_logprobs(
        step: _InFlight, counts: list[int] | None
    ) -> dict[int, list[TokenLogprobs]]:
        if step.logprobs is None:
            return {}
        if counts is None:
            entries = step.logprobs.entries(step.logprob_widths)
            return {row: [entry] for row, entry in zip(step.logprob_rows, entries, strict=True)}
        rows = step.logprob_rows
        at = {row: index for index, row in enumerate(step.plan.sampled_rows())}
        bounds = [step.plan.bounds[at[row]] for row in rows]
        widths = np.repeat(step.logprob_widths, bounds).tolist()
        parts = _kept(step.logprobs.entries(widths), bounds, [counts[at[row]] for row in rows])
        return dict(zip(rows, parts, strict=True))

    def _wait(self, done: torch.cuda.Event) -> None:
        """Until the step has ended, or its deadline: an event alone would wait for ever."""
        deadline = time.monotonic() + self._step_timeout
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError(f"a step did not end within {self._step_timeout:.0f} s")

    def measure_host(self) -> float:
        """See `HostTier.measure`; 0 without a host tier."""
        return 0.0 if self._host is None else self._host.measure()

    def copies_ended(self) -> tuple[int, int]:
        """See `Executor.copies_ended`."""
        return (0, 0) if self._host is None else self._host.ended()

    def expert_tokens(self) -> NDArray[np.int64] | None:
        """See `Executor.expert_tokens`."""
        return None if self.expert_load is None else self.expert_load.read()

    def close(self) -> None:
        """Give up what is in flight, and the graphs. Nothing may be launched after it."""
        self._forwarded = None
        self._in_flight.clear()
        if self._host is not None:
            self._host.close()
            self._host = None
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
        if self._mixed is not None:
            self._mixed.release()
            self._mixed = None
