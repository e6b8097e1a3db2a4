"""A conversation as the text that its chat template makes of it.

What a user types stays text: special tokens inside it are broken by a sentinel before the template
sees them, so that only the template's own control the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import ChatMessage, ToolCall
from radixgrove.protocol.openai.requests import ChatRequest
from radixgrove.protocol.openai.tools import INPUT
from radixgrove.protocol.text.templates import (
    THOUGHTS,
    ChatTemplate,
    TemplateFailure,
    TemplateRefusal,
)
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.protocol.text.user_text import END, SpecialTextGuard, guard_values


class ChatRenderer:
    """Renders conversations for one model, from any thread."""

    def __init__(self, files: TokenizerFiles, special: Collection[str]) -> None:
        """
        Args:
            special: texts that are tokens where the template writes them.

        Raises:
            ValueError: the chat template is not valid Jinja.
            UnknownFormatError: as `TokenizerFiles.format`.
        """
        source, tool_source = files.chat_template(), files.tool_template()
        texts = files.special_texts()
        self._template = ChatTemplate(source, texts) if source is not None else None
        self._tool_template = (
            ChatTemplate(tool_source, texts) if tool_source is not None else self._template
        )
        self._guard = SpecialTextGuard(special)
        # An assistant's own text, where clients send reasoning back as part of it: templates look
        # for its markers there.
        reasoning = files.format.reasoning
        thoughts = () if reasoning is None else reasoning.markers
        self._assistant_guard = SpecialTextGuard([text for text in special if text not in thoughts])

    def render(self, request: ChatRequest) -> str:
        """The conversation as text, still with sentinels inside what users typed.

        Raises:
            ApiError: 400.
        """
        template = self._template if request.tools is None else self._tool_template
        if template is None:
            raise errors.invalid("This model has no chat template.", "messages")
        tools = self._tools(template, request)
        kwargs = template.check_kwargs(request.template_kwargs)
        messages = [
            self._template_message(template, index, message)
            for index, message in enumerate(request.messages)
        ]
        if request.continue_final_message:
            _mark_end(messages[-1])
        try:
            text = template.render(messages, tools, request.add_generation_prompt, kwargs)
        except TemplateRefusal as refusal:
            raise errors.invalid(
                f"This model's chat template refuses these messages: {refusal}", "messages"
            ) from None
        except TemplateFailure:
            raise errors.invalid(
                "This model's chat template cannot render these messages.", "messages"
            ) from None
        if request.continue_final_message:
            text, found, rest = text.rpartition(END)
            if not rest.startswith(" "):  # the template trims what it is given
                text = text.rstrip()
            if not found:
                raise errors.invalid(
                    "This model's chat template cannot continue the final message.",
                    "continue_final_message",
                )
        return text

    def _tools(self, template: ChatTemplate, request: ChatRequest) -> list[Any] | None:
        """Definitions of tools as they came, their texts guarded."""
        if request.tools is None:
            return None
        if not template.knows_tools:
            raise errors.unsupported("tools", "This model's chat template has no tools.")
        guarded: list[Any] = guard_values(request.tools.definitions, self._guard)
        return guarded

    def _template_message(
        self, template: ChatTemplate, index: int, message: ChatMessage
    ) -> dict[str, Any]:
        """A message as templates expect it, its texts guarded."""
        role = message.role
        guard = self._assistant_guard if role == "assistant" else self._guard
        if role == "developer" and not template.knows_developer:
            role = "system"
        result: dict[str, Any] = {
            "role": role,
            "content": _content(message, guard, template.takes_parts),
        }
        if message.name is not None:
            result["name"] = guard(message.name)
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            thoughts = self._guard(reasoning)
            said = result["content"]
            if message.tool_calls and not template.parts_thoughts and isinstance(said, str):
                thoughts = "\n\n".join(filter(None, (thoughts, said)))
                result["content"] = template.empty_content
            result |= dict.fromkeys(THOUGHTS, thoughts)
        if message.role == "tool" or message.tool_calls:
            if not template.knows_tool_calls:
                field = "tool_calls" if message.tool_calls else "role"
                raise errors.unsupported(
                    f"messages[{index}].{field}", "This model's chat template has no tool calls."
                )
            if message.tool_call_id is not None:
                result["tool_call_id"] = guard(message.tool_call_id)
            if message.tool_calls:
                if not result["content"]:
                    result["content"] = template.empty_content
                result["tool_calls"] = [
                    {
                        "id": guard(call.id or ""),
                        "type": "function",
                        "function": self._called(template, call, guard),
                    }
                    for call in message.tool_calls
                ]
        return result

    def _called(
        self, template: ChatTemplate, call: ToolCall, guard: Callable[[str], str]
    ) -> dict[str, Any]:
        """A call's name and arguments; of a custom tool, as the model sees that one."""
        if call.function is not None:
            name, arguments = call.function.name, call.function.arguments or "{}"
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
        else:
            assert call.custom is not None
            name = call.custom.name
            arguments = msgspec.json.encode({INPUT: call.custom.input}).decode()
        return {"name": guard(name), "arguments": self._arguments(template, arguments)}

    def _arguments(self, template: ChatTemplate, text: str) -> Any:
        """Arguments as an object, where they are one and the template takes it."""
        if not template.takes_objects:
            return self._guard(text)
        try:
            return guard_values(msgspec.json.decode(text, type=dict[str, Any]), self._guard)
        except (msgspec.DecodeError, RecursionError):
            return self._guard(text)


def _content(message: ChatMessage, guard: Callable[[str], str], takes_parts: bool) -> Any:
    """A message's content as its template takes it: one text, or a list of text parts."""
    if not isinstance(message.content, list):
        return guard(message.content or message.refusal or "")
    texts = [part.text or part.refusal or "" for part in message.content]
    if takes_parts:
        return [{"type": "text", "text": guard(text)} for text in texts]
    return guard("\n".join(texts))


def _mark_end(message: dict[str, Any]) -> None:
    """Put `END` behind a message's text; the blank after it shows whether the template trims."""
    content = message["content"]
    if not isinstance(content, list):
        message["content"] = (content or "") + END + " "
    elif content:
        content[-1]["text"] += END + " "
