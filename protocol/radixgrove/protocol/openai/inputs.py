"""What a request gives the model to read, checked: messages, texts and token ids."""

from __future__ import annotations

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import (
    MAX_SEQUENCES,
    MESSAGE_UNSUPPORTED,
    PART_TYPES,
    ChatMessage,
    ContentPart,
)
from radixgrove.protocol.openai.requests import ModelLimits

ROLES = ("system", "developer", "user", "assistant", "tool")


def valid_token_ids(ids: list[int], param: str, vocab_size: int) -> list[int]:
    """The same ids.

    Raises:
        ApiError: 400, one is not of the vocabulary.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise errors.invalid(f"'{param}' has a token id outside 0..{vocab_size - 1}.", param)
    return ids


def checked_prompts(
    prompt: str | list[str | int | list[int]] | None, limits: ModelLimits
) -> list[str] | list[list[int]]:
    if prompt is None:
        raise errors.invalid("Missing required parameter: 'prompt'.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.invalid("'prompt' must not be empty.", "prompt")
    if all(type(item) is int for item in prompt):
        single = [item for item in prompt if isinstance(item, int)]
        return [valid_token_ids(single, "prompt", limits.vocab_size)]
    if len(prompt) > MAX_SEQUENCES:
        raise errors.invalid(f"'prompt' has more than {MAX_SEQUENCES} entries.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return texts
    if len(lists) != len(prompt):
        raise errors.invalid("'prompt' must not mix strings and token ids.", "prompt")
    for index, ids in enumerate(lists):
        if not ids:
            raise errors.invalid(f"'prompt[{index}]' must not be empty.", f"prompt[{index}]")
        valid_token_ids(ids, f"prompt[{index}]", limits.vocab_size)
    return lists


def checked_messages(messages: list[ChatMessage] | None) -> list[ChatMessage]:
    if messages is None:
        raise errors.invalid("Missing required parameter: 'messages'.", "messages")
    if not messages:
        raise errors.invalid("'messages' must not be empty.", "messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _check_message(message, f"messages[{index}]")
    return messages


def _is_plain(message: ChatMessage) -> bool:
    """Whether it is a text by someone known, and asks for nothing more: most are."""
    return (
        message.role in ROLES
        and isinstance(message.content, str)
        and message.tool_calls is None
        and message.audio is None
        and message.function_call is None
    )


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise errors.invalid(
            f"Invalid value for '{where}.role': must be one of {', '.join(ROLES)}.",
            f"{where}.role",
        )
    for field in MESSAGE_UNSUPPORTED:
        if getattr(message, field) is not None:
            raise errors.unsupported(f"{where}.{field}")
    if message.content is None and message.role != "assistant":
        raise errors.invalid(f"Missing required parameter: '{where}.content'.", f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise errors.invalid(
            f"'{where}.tool_calls' is allowed in assistant messages only.",
            f"{where}.tool_calls",
        )
    for number, call in enumerate(message.tool_calls or ()):
        if (call.function is None) == (call.custom is None):
            raise errors.invalid(
                f"'{where}.tool_calls[{number}]' must have 'function' or 'custom'.",
                f"{where}.tool_calls[{number}].function",
            )
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            _check_part(part, f"{where}.content[{position}]")


def _check_part(part: ContentPart, where: str) -> None:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in PART_TYPES:
        raise errors.unsupported(where, f"'{where}' is not text; only text parts are supported.")
    if text is None:
        raise errors.invalid(f"Missing required parameter: '{where}.text'.", f"{where}.text")
