"""Sampling parameters of every row, on the device, and what each row needs done."""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.plan import NewRow


class SamplingFeatures(IntFlag):
    """Work beyond greedy choice; a batch does what any of its rows needs."""

    NOTHING = 0
    RANDOM = 1  # temperature above 0
    FILTER = 2  # top-k, top-p or min-p
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16  # stop tokens are masked until then
    LOGPROBS = 32

    @classmethod
    def of(cls, sampling: SamplingParams) -> SamplingFeatures:
        need = cls.NOTHING
        if not sampling.is_greedy:
            need |= cls.RANDOM
            if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                need |= cls.FILTER
        if (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        ):
            need |= cls.PENALTY
        if sampling.logit_bias:
            need |= cls.BIAS
        if sampling.min_tokens > 0 and sampling.stop_token_ids:
            need |= cls.MIN_TOKENS
        if sampling.logprobs is not None:
            need |= cls.LOGPROBS
        return need


EDITS = int(
    SamplingFeatures.PENALTY | SamplingFeatures.BIAS | SamplingFeatures.MIN_TOKENS
)  # change the logits before the draw


class SparseRows:
    """A short list of (token, value) per row, padded to a common width that grows by doubling."""

    def __init__(self, rows: int, device: torch.device, tokens: int) -> None:
        """`tokens`: ids from here on have no logit, and entries for them no effect."""
        self._tokens = tokens
        self.ids = torch.zeros((rows, 0), dtype=torch.int64, device=device)
        self.values = torch.zeros((rows, 0), dtype=torch.float32, device=device)

    def set(self, row: int, entries: dict[int, float]) -> None:
        """Padding adds 0 to token 0, which changes nothing."""
        entries = {token: value for token, value in entries.items() if token < self._tokens}
        width = self.ids.shape[1]
        if len(entries) > width:
            grown = 1 << (len(entries) - 1).bit_length()
            self.ids = torch.nn.functional.pad(self.ids, (0, grown - width))
            self.values = torch.nn.functional.pad(self.values, (0, grown - width))
            width = grown
        ids = np.zeros(width, dtype=np.int64)
        values = np.zeros(width, dtype=np.float32)
        ids[: len(entries)] = list(entries.keys())
        values[: len(entries)] = list(entries.values())
        self.ids[row] = to_device(ids, self.ids.device)
        self.values[row] = to_device(values, self.values.device)


class SamplingState:
    """One row of parameters a request, `max_rows + 1` rows (the last is the dummy row, greedy)."""

    FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    INTEGERS = ("seed", "top_k", "prompt_len", "min_tokens")

    def __init__(self, max_rows: int, device: torch.device, tokens: int) -> None:
        """`tokens`: how many ids have a logit."""
        rows = max_rows + 1
        self._device = device
        self._floats = torch.zeros((rows, len(self.FLOATS)), dtype=torch.float32, device=device)
        self._integers = torch.zeros((rows, len(self.INTEGERS)), dtype=torch.int64, device=device)
        self.bias = SparseRows(rows, device, tokens)
        self.stops = SparseRows(rows, device, tokens)
        self.params: list[SamplingParams | None] = [None] * rows
        self.needs = [0] * rows  # of `Need`, as plain integers: they are combined at every step
        self.prompt_lens = [0] * rows

    def enter(self, new_rows: list[NewRow]) -> None:
        floats, integers = [], []
        for new in new_rows:
            sampling = new.sampling
            self.params[new.row] = sampling
            self.prompt_lens[new.row] = new.prompt_len
            need = SamplingFeatures.of(sampling)
            self.needs[new.row] = int(need)
            if SamplingFeatures.BIAS in need:
                self.bias.set(new.row, sampling.logit_bias)
            if SamplingFeatures.MIN_TOKENS in need:
                self.stops.set(new.row, dict.fromkeys(sampling.stop_token_ids, float("-inf")))
            floats.append(
                (
                    0.0 if sampling.is_greedy else sampling.temperature,
                    sampling.top_p,
                    sampling.min_p,
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                )
            )
            # Seeds are any 64-bit pattern; the device's integers are signed.
            seed = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)
            integers.append((seed, sampling.top_k, new.prompt_len, sampling.min_tokens))
        rows = to_device(np.array([new.row for new in new_rows], dtype=np.int64), self._device)
        self._floats.index_copy_(
            0, rows, to_device(np.array(floats, dtype=np.float32), self._device)
        )
        self._integers.index_copy_(
            0, rows, to_device(np.array(integers, dtype=np.int64), self._device)
        )

    def column(self, name: str) -> Tensor:
        """One of `FLOATS` or `INTEGERS`, of all rows: a strided view, for kernels that take the
        rows they need."""
        if name in self.FLOATS:
            return self._floats[:, self.FLOATS.index(name)]
        return self._integers[:, self.INTEGERS.index(name)]

    def floats(self, rows: Tensor) -> dict[str, Tensor]:
        """Each of `FLOATS` as [S] float32."""
        columns = self._floats.index_select(0, rows).T.contiguous()
        return dict(zip(self.FLOATS, columns, strict=True))

    def integers(self, rows: Tensor) -> dict[str, Tensor]:
        """Each of `INTEGERS` as [S] int64."""
        columns = self._integers.index_select(0, rows).T.contiguous()
        return dict(zip(self.INTEGERS, columns, strict=True))
