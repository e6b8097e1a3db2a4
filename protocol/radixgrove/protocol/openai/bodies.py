"""OpenAI's request bodies for chat and text completions, as msgspec reads them off the wire.

Types and simple bounds are declared here and checked while decoding; unknown fields are ignored, as
OpenAI's own clients need, but not where an object says of what form an answer must be: there one
would leave the answer free. What a field means, and checks across fields, is in `requests`.

Fields typed `Any` ask for something this server does not do. Each may have a value that asks for
nothing (`function_call: "none"`): see the tables at the end.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from radixgrove.protocol.constraints.constraint import Tag
from radixgrove.protocol.openai.sampling import (
    MAX_TOP_LOGPROBS,
    Probability,
    RepetitionPenalty,
    Temperature,
    TopK,
)

MAX_SEQUENCES = 128  # choices of one request: OpenAI's bound for `n`
MAX_MESSAGES = 8192
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024  # entries
MAX_BIAS = 100
MAX_TEMPLATE_KWARGS = 16
MAX_CHOICES = 8192  # of texts, one of which an answer is
MAX_ALLOWED_TOKENS = 1 << 20
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None
    # Of `structural_tag`, as SGLang has it.
    structures: list[Tag] | None = None
    triggers: list[str] | None = None
    # Beside `json_object`, as llama.cpp has it.
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As `response_format` has it."""

    type: str
    structures: list[Tag] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; each of its forms but `json_object` has a twin of an older name."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    disable_fallback: Any = None  # to another engine of grammars: there is one here
    # Of clients that send vLLM's own object whole.
    backend: Any = msgspec.field(default=None, name="_backend")
    backend_was_auto: Any = msgspec.field(default=None, name="_backend_was_auto")

    # Not supported.
    disable_additional_properties: Any = None
    disable_any_whitespace: Any = None
    whitespace_pattern: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # an object's text, or the object itself


class CustomCall(msgspec.Struct, kw_only=True):
    name: str
    input: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """Of a function, or of a custom tool: one of both is there."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: Any = None
    function_call: Any = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | StopStrings | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Int64 | None = None
    service_tier: Any = None  # echoed when it is a string

    # Extensions that users of other servers know.
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    prefix_cache: bool | None = None  # ours: false bypasses the prefix cache
    # Prefixes are shared only among requests with the same one.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    # The form of the answer: one of these at most.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    # Which tokens it may have.
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None

    # Not supported.
    custom_logit_processor: Any = None
    guided_whitespace_pattern: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    spaces_between_special_tokens: Any = None
    stop_regex: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class ChatBody(GenerationBody, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)] | None = (
        None
    )
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    max_reasoning_tokens: Count | None = None
    # In `tools` definitions stay as they came: chat templates show them.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Not supported.
    add_special_tokens: Any = None
    audio: Any = None
    best_of: Any = None  # other than `n`
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    add_special_tokens: bool | None = None  # before a text
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None

    # Not supported.
    prompt_embeds: Any = None
    suffix: Any = None


# Values, beside null, with which an unsupported field asks for nothing.
Neutral = dict[str, tuple[Any, ...]]

NEUTRAL: Neutral = {
    "custom_logit_processor": (),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ("", []),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "add_special_tokens": (False,),  # templates write them
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: Neutral = NEUTRAL | {"prompt_embeds": (), "suffix": ("",)}
STRUCTURED_NEUTRAL: Neutral = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "whitespace_pattern": (),
}

# Types of `response_format`, each with the fields that it has beside `type`.
RESPONSE_TYPES: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers"),
}
STRUCTURED_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# What objects may have of which unknown fields are refused, by the field that holds the object.
KNOWN = {
    "json_schema": JsonSchema.__struct_fields__,
    "response_format": ResponseFormat.__struct_fields__,
    "structural_tag": StructuralTag.__struct_fields__,
    "structures": Tag.__struct_fields__,
    "structured_outputs": STRUCTURED_FORMS,
}

MESSAGE_UNSUPPORTED = ("audio", "function_call")  # fields of a message, unless null
PART_TYPES = ("text", "refusal")  # of a message's content

# Known fields, of OpenAI's own and of other servers, that change no answer here. Like every field
# that is unknown they are not read; documents name them.
IGNORED = (
    "kv_transfer_params",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "store",
    "stream_options.include_obfuscation",
    "user",
    "verbosity",
)
