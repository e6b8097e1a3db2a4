"""Sampling parameters as they travel from an API request to the sampler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# OpenAI's bound for `top_logprobs`; also the width of the tensors that carry them.
MAX_TOP_LOGPROBS = 20
# Below it a draw is the most probable token, and logits divided by it leave float32.
LEAST_TEMPERATURE = 1e-6


Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that leaves a field out is sampled with: as at OpenAI, or as a model says."""

    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: TopK = 0  # 0, -1: off
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One sequence's sampling settings, already validated and bounded.

    A `temperature` below `LEAST_TEMPERATURE` means greedy. `seed` is always set (drawn at the edge
    when the client gave none): the random number of position p is a pure function of (seed, p),
    whatever the batch.
    Stop *strings* are not here: the frontend owns text, the scheduler owns tokens.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's EOS ids unless `ignore_eos`
    # None: no logprobs. 0..MAX_TOP_LOGPROBS: that many alternatives beside the chosen token.
    logprobs: int | None = None
    # As `logprobs`, for the prompt's own tokens (echo). A request with it never reads the cache.
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE
