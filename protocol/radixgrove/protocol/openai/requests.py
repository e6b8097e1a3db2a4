"""Requests as router and worker know them: validated and bounded, whatever their endpoint.

`parsing` makes them of bodies. Nothing in them needs checking again, except what depends on the
prompt's length in tokens (`Generation.max_tokens_for`) and on the chat template (`prompts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from radixgrove.protocol.constraints.constraint import Constraint
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import ChatMessage
from radixgrove.protocol.openai.sampling import SamplingDefaults, SamplingParams
from radixgrove.protocol.openai.tools import Tools


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request to one model is checked against."""

    max_model_len: int  # prompt and completion together, in tokens
    vocab_size: int  # ids of every id-valued field are below it
    defaults: SamplingDefaults = SamplingDefaults()  # for what the request leaves out


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of the generation, whatever its endpoint."""

    sampling: SamplingParams  # of the first choice; `max_tokens` is settled by `sampling_for`
    max_tokens: int | None  # None: as many as fit
    n: int  # choices of each prompt
    shown: int  # of these, the most probable ones
    shows_logprobs: bool
    prompt_logprobs: int | None  # alternatives to each of the prompt's tokens, which are shown
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool  # every chunk of a stream has the usage so far
    ignore_eos: bool
    include_stop: bool  # the stop string or token ends the text instead of being cut off
    skip_special_tokens: bool
    priority: int
    prefix_cache: bool
    cache_salt: str | None
    return_token_ids: bool
    service_tier: str | None
    prompt_param: str  # "messages" or "prompt"
    constraint: Constraint | None = None  # what the answer must be
    allowed_token_ids: tuple[int, ...] | None = None  # the only ones that it may have
    bad_words: tuple[str, ...] = ()  # which it must not have

    def length_for(self, prompt_tokens: int) -> int:
        """How many tokens a model must take at least, for a prompt of that length and what follows.

        Where a prompt is only scored, the engine draws a token behind it; where it is only shown,
        no engine is asked.
        """
        if self.max_tokens is None:
            return prompt_tokens + 1
        scored = self.sampling.prompt_logprobs is not None
        return prompt_tokens + max(self.max_tokens, int(scored))

    def max_tokens_for(self, prompt_tokens: int, limits: ModelLimits) -> int:
        """How many tokens to generate after a prompt of that length.

        Raises:
            ApiError: 400 `context_length_exceeded`, when prompt and completion do not fit.
        """
        longest, length = limits.max_model_len, self.length_for(prompt_tokens)
        if length > longest:
            raise errors.context_length_exceeded(
                longest, prompt_tokens, length - prompt_tokens, self.prompt_param
            )
        return (longest if self.max_tokens is None else length) - prompt_tokens

    def sampling_for(
        self, max_tokens: int, sequence: int, eos_ids: Iterable[int]
    ) -> SamplingParams:
        """Sampling of one sequence; each of a request's sequences has a seed of its own."""
        stops = dict.fromkeys(self.sampling.stop_token_ids)
        if not self.ignore_eos:
            stops.update(dict.fromkeys(eos_ids))
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=max_tokens,
            seed=(self.sampling.seed + sequence) % (1 << 63),
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            stop_token_ids=tuple(stops),
        )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to any endpoint, checked."""

    model: str
    generation: Generation

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def echoed(self) -> list[str] | list[list[int]]:
        """Prompts, as they were given, that are shown before their choices; empty: none is."""
        return []


class ChatRequest(Request, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Tools | None
    include_reasoning: bool  # false: it is generated, but not shown
    max_reasoning_tokens: int | None  # after which a block of reasoning is ended


class CompletionRequest(Request, frozen=True, kw_only=True):
    prompts: list[str] | list[list[int]]
    echo: bool
    special: bool  # what the tokenizer puts before a text comes before each

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def echoed(self) -> list[str] | list[list[int]]:
        return self.prompts if self.echo else []
