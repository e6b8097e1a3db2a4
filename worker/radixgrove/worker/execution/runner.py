"""The runner: executes step plans, keeping up to `depth` of them in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.worker.attention.base import AttentionBackend
from radixgrove.worker.execution.graphs import DecodeGraphs, Recorder
from radixgrove.worker.execution.inputs import StepInputs, step_inputs
from radixgrove.worker.execution.memory import cuda_shortage
from radixgrove.worker.execution.page_copier import PageCopier
from radixgrove.worker.execution.prefill_graphs import MixedGraphs
from radixgrove.worker.execution.sampling.logprobs import LogprobTensors, token_logprobs
from radixgrove.worker.execution.sampling.sampler import Sampled, Sampler
from radixgrove.worker.execution.sampling.state import SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.messages import TokenLogprobs
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.parallel.group import TensorParallel
from radixgrove.worker.plan import ExecutorInfo, PrefillChunk, StepPlan, StepResult

# Prompt positions whose logits exist at once: bounds a float32 buffer of this many vocabularies.
_PROMPT_LOGITS = 256


@dataclass(slots=True)
class _PromptLogprobs:
    row: int
    width: int
    parts: list[LogprobTensors]


@dataclass(slots=True)
class _InFlight:
    """A launched step: where its results will be on the host, and the event that says when."""

    step_id: int
    tokens: Tensor  # [S] on the host
    sampled: Sampled
    logprob_widths: list[int]
    prompts: list[_PromptLogprobs]
    done: torch.cuda.Event | None


class _ResultCopies:
    """Samples on their way to the host, on a stream of their own: the next step need not wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def fetch(self, samples: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Samples [S] on the host once the event, which ends the step, has happened."""
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
    """An `Executor` on one device; with tensor parallelism, one rank of several."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        table: RequestTable,
        info: ExecutorInfo,
        step_timeout: float,
        host: PageCopier | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._table = table
        self._info = info
        self._step_timeout = step_timeout
        self._host = host
        self._device = model.device
        self._state = SamplingState(info.max_rows, model.device, model.known_tokens)
        self._sampler = Sampler(self._state, table)
        self._recorder = Recorder(model.device)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._results = _ResultCopies(model.device) if model.device.type == "cuda" else None

    def capture(self, sizes: list[int], report: Callable[[str, float], None]) -> DecodeGraphs:
        """From now on decode-only steps of up to the largest of `sizes` rows are replayed."""
        graphs = DecodeGraphs(
            self._model, self._attention, self._table, self._sampler, self._recorder, sizes
        )
        graphs.capture(report)
        self._graphs = graphs
        return graphs

    def capture_mixed(self, sizes: list[int], report: Callable[[str, float], None]) -> MixedGraphs:
        """The same for steps with chunks, of up to the largest of `sizes` tokens.

        After `capture`, for whose largest size the attention backend has its buffers.
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
    def group(self) -> TensorParallel:
        return self._model.group

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See `Executor.launch`. On a CPU the step is done on return."""
        if len(self._in_flight) >= self._info.depth:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight already")
        try:
            self._in_flight.append(self._run(plan))
        except torch.cuda.OutOfMemoryError as error:
            doing = f"in a step of {plan.num_tokens} tokens"
            raise RuntimeError(cuda_shortage(self._device, doing)) from error

    def _run(self, plan: StepPlan) -> _InFlight:
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
            nothing = torch.empty(0, dtype=torch.int64)
            return _InFlight(plan.step_id, nothing, Sampled(nothing, [], None), [], [], None)
        if graphs is not None:
            fetched = self._results.await_last if self._results is not None else _nothing
            sampled = graphs.run(plan.decodes, fetched)
            self._table.advance(plan.decodes)
            return self._finish(plan.step_id, sampled, [])
        inputs = step_inputs(plan, self._table, self._device)
        sampled_tokens = inputs.sampled_tokens
        if mixed is not None:
            hidden = mixed.run(inputs).index_select(0, sampled_tokens)
            sampled = self._sample(plan.sampled_rows(), inputs, hidden)
            return self._finish(plan.step_id, sampled, [])
        self._attention.plan(inputs.batch)
        hidden = self._model.hidden_states(
            inputs.token_ids,
            inputs.batch,
            self._attention,
            None if whole else sampled_tokens,
            await_layer=await_layer,
        )
        prompts = self._prompt_logprobs(plan.prefills, hidden) if whole else []
        if whole:
            hidden = hidden.index_select(0, sampled_tokens)
        sampled = self._sample(plan.sampled_rows(), inputs, hidden)
        return self._finish(plan.step_id, sampled, prompts)

    def _decode_graphs(self, plan: StepPlan) -> DecodeGraphs | None:
        """Graphs that can replay the plan's step."""
        graphs = self._graphs
        fits = graphs is not None and not plan.prefills and graphs.fits(plan.decodes)
        return graphs if fits else None

    def _mixed_graphs(self, plan: StepPlan) -> MixedGraphs | None:
        return self._mixed if self._mixed is not None and self._mixed.fits(plan) else None

    def _want_prompt_logprobs(self, prefills: list[PrefillChunk]) -> bool:
        params = (self._state.params[chunk.row] for chunk in prefills)
        return any(p is not None and p.prompt_logprobs is not None for p in params)

    def _sample(self, rows: list[int], inputs: StepInputs, hidden: Tensor) -> Sampled:
        if not rows:
            return Sampled(inputs.sampled_rows, [], None)
        logits = self._model.logits(hidden)
        sampled = self._sampler.sample(logits, inputs.sampled_rows, rows)
        self._table.advance(rows)
        return sampled

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

    def _finish(self, step_id: int, sampled: Sampled, prompts: list[_PromptLogprobs]) -> _InFlight:
        if sampled.logprobs is not None:
            sampled.logprobs = sampled.logprobs.to_host()
        widths = [self._sampler.logprob_width(row) for row in sampled.logprob_rows]
        if self._results is None:
            return _InFlight(step_id, sampled.tokens.clone(), sampled, widths, prompts, None)
        tokens, done = self._results.fetch(sampled.tokens)
        if self._host is not None:
            self._host.stepped(step_id, done)
        return _InFlight(step_id, tokens, sampled, widths, prompts, done)

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        step = self._in_flight.popleft()
        if step.done is not None:
            self._wait(step.done)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if step.sampled.logprobs is not None:
            entries = step.sampled.logprobs.entries(step.logprob_widths)
            logprobs = {
                row: [entry] for row, entry in zip(step.sampled.logprob_rows, entries, strict=True)
            }
        return StepResult(
            step_id=step.step_id,
            tokens=step.tokens.tolist(),
            logprobs=logprobs,
            prompt_logprobs={
                prompt.row: [
                    entry
                    for part in prompt.parts
                    for entry in part.entries([prompt.width] * part.chosen.shape[0])
                ]
                for prompt in step.prompts
            },
        )

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

    def close(self) -> None:
        """Give up what is in flight, and the graphs. Nothing may be launched after it."""
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
