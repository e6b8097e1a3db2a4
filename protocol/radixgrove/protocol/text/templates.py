"""Chat templates: the model's own Jinja source, rendered in a sandbox with caps on output and time.

Templates come from the model's files, never from a client, yet they are code of unknown origin.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sized
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.openai import errors

MAX_OUTPUT_CHARS = 1 << 26
MAX_SECONDS = 2.0
MAX_KWARG_CHARS = 256
# What requests may never set through `chat_template_kwargs`.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"}
)
_PROBE = "radixgrove probe"
_CALLED = "radixgrove_function"
_CALL_ID = "radixcall"  # nine letters, which Mistral's templates insist on
_ASKING = {"role": "user", "content": "?"}
_PRINTED_PARTS = ("'text'", '"text"', "&#39;text&#39;", "&#34;text&#34;")
# Switches that clients send to every model; turned off they ask for nothing where unknown.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what templates call them in a message
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class TemplateRefusal(InvalidInput):
    """The template itself refuses the messages, in its own words."""


class TemplateFailure(InvalidInput):
    """The template fails on these messages, or exceeds a cap."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Render(threading.local):
    """The render that a thread is at."""

    deadline = math.inf  # monotonic


class _Sandbox(ImmutableSandboxedEnvironment):
    """Calls check the deadline of the running render, so that a loop of calls cannot go on."""

    running = _Render()
    intercepted_binops = frozenset({"*", "**"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`loop.first` and the like come once a message: spare them the full inspection."""
        if type(obj) is LoopContext and attribute[:1] != "_":
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """No powers, and products within what a prompt may hold: no `"x" * 10**10`."""
        if operator == "**":
            raise TemplateFailure("power")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, Sized) and len(text) * times > MAX_OUTPUT_CHARS:
                raise TemplateFailure("output")
        return super().call_binop(context, operator, left, right)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() > self.running.deadline:
            raise TemplateFailure("time")
        return super().call(*args, **kwargs)


class ChatTemplate:
    """One model's template, for any number of threads: a long conversation delays no short one."""

    def __init__(self, source: str, special_texts: dict[str, str]) -> None:
        """
        Raises:
            ValueError: the source is not a Jinja template.
        """
        self._environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals.update(
            special_texts, raise_exception=_raise_exception, strftime_now=_strftime_now
        )
        try:
            self._template = self._environment.from_string(source)
            # Each render copies them: that of Jinja's chain of mappings takes as long as a render.
            self._template.globals = dict(self._template.globals)
            tree = self._environment.parse(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", 0)  # of a syntax error
            where = f"{error.message} (line {line})" if line else error.message
            raise ValueError(f"the chat template is not valid Jinja: {where}") from error
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.knows_tools = "tools" in self.variables
        self.knows_tool_calls = "tool_calls" in source
        self.knows_developer = "developer" in source
        self.takes_parts = self._takes_parts()
        self.empty_content: str | None = ""
        self.takes_objects = True
        self.parts_thoughts = True  # what is said before calls is apart from what was thought
        if self.knows_tool_calls:
            self.empty_content, self.takes_objects = self._form_of_calls()
            self.parts_thoughts = not self._refuses_both()

    def _takes_parts(self) -> bool:
        """Whether it renders a content given as a list of parts, rather than print the list."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self.render([{"role": "user", "content": parts}], None, True, {})
        except (TemplateRefusal, TemplateFailure):
            return False
        return _PROBE in text and not any(printed in text for printed in _PRINTED_PARTS)

    def _form_of_calls(self) -> tuple[str | None, bool]:
        """What stands for the content of a message that has calls alone, and whether their
        arguments are an object: the first form that the template shows whole.

        Some show calls where the content is none only, and some print arguments as text.
        """
        for arguments in ({_PROBE: 1}, f'{{"{_PROBE}": 1}}'):
            for content in ("", None):
                message = _calling(content, arguments)
                try:
                    text = self.render([_ASKING, message], None, False, {})
                except (TemplateRefusal, TemplateFailure):
                    continue
                if _CALLED in text and _PROBE in text:
                    return content, not isinstance(arguments, str)
        return "", True

    def _refuses_both(self) -> bool:
        """Whether a message with calls may have a content or thoughts, and not both (gpt-oss)."""
        arguments = {_PROBE: 1} if self.takes_objects else "{}"
        thoughts = dict.fromkeys(THOUGHTS, _PROBE)
        try:
            self.render(
                [_ASKING, _calling(self.empty_content, arguments) | thoughts], None, False, {}
            )
        except (TemplateRefusal, TemplateFailure):
            return False
        try:
            self.render([_ASKING, _calling(_PROBE, arguments) | thoughts], None, False, {})
        except TemplateRefusal:
            return True
        except TemplateFailure:
            pass
        return False

    def check_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keep what the template reads.

        Raises:
            ApiError: 400 for anything that it would ignore, or that is no short scalar.
        """
        kept: dict[str, Any] = {}
        for name, value in kwargs.items():
            param = (
                "reasoning_effort"
                if name == "reasoning_effort"
                else f"chat_template_kwargs.{name[:64]}"
            )
            scalar = value is None or isinstance(value, bool | int | float | str)
            if not scalar or len(str(value)) > MAX_KWARG_CHARS:
                raise errors.invalid(f"'{param}' must be a short string, number or boolean.", param)
            if name in self.variables and name not in RESERVED_VARIABLES:
                kept[name] = value
            elif not (name in THINKING_SWITCHES and not value):
                raise errors.unsupported(
                    param, f"This model's chat template does not read '{param}'."
                )
        return kept

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
    ) -> str:
        """The conversation as one text.

        Raises:
            TemplateRefusal: the template called `raise_exception`.
            TemplateFailure: it failed, or exceeded `MAX_OUTPUT_CHARS` or `MAX_SECONDS`.
        """
        deadline = time.monotonic() + MAX_SECONDS
        self._environment.running.deadline = deadline
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS or time.monotonic() > deadline:
                    raise TemplateFailure("output or time")
        except (TemplateRefusal, TemplateFailure):
            raise
        except Exception as error:
            # Whatever a template does wrong with these messages is the request's failure alone.
            raise TemplateFailure("render") from error
        return "".join(pieces)


def _calling(content: str | None, arguments: object) -> dict[str, Any]:
    function = {"name": _CALLED, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message)[:200])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `json.dumps`: Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
