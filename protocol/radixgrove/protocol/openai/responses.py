"""OpenAI's response bodies for chat and text completions, as types; `formats` writes them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int = 0) -> Usage:
        """`prompt` and `cached` count each prompt once, however many choices it has."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(reasoning),
        )


# ---- logprobs --------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """One token of a chat completion's `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists; the first token of an echoed prompt has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Of one token at one place of a prompt, as vLLM has it."""

    logprob: float
    rank: int | None  # from 1 on; None: it is none of the most probable ones
    decoded_token: str


# At each place by token id: those of the prompt and its alternatives. The first has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


# ---- whole responses -------------------------------------------------------------------------


class FunctionOut(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class CustomOut(msgspec.Struct, kw_only=True):
    name: str
    input: str


class ToolCallOut(msgspec.Struct, kw_only=True):
    """Of a function, or of a custom tool, as `type` says."""

    id: str
    type: str
    function: FunctionOut | msgspec.UnsetType = msgspec.UNSET
    custom: CustomOut | msgspec.UnsetType = msgspec.UNSET


class ChatMessageOut(msgspec.Struct, kw_only=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    # The same under two names: clients read the one or the other.
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallOut] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageOut
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Head(msgspec.Struct, kw_only=True):
    """What every object of one response has in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Head, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(Head, kw_only=True):
    choices: list[CompletionChoice]
    usage: Usage


# ---- models ----------------------------------------------------------------------------------


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int | None  # None: a foreign engine's, which does not say
    owned_by: str = "radixgrove"
    object: str = "model"
    root: str | None = None  # the id of which this one is an alias
    output_format: str | None = None  # how it writes reasoning and tool calls, where known
    capabilities: list[str] = []


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"
