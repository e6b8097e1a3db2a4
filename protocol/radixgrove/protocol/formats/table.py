"""Formats of known families, and by what in a chat template each is recognized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.formats.response_template import calls_of, reasoning_of
from radixgrove.protocol.formats.shapes import (
    CallIds,
    Calls,
    Channels,
    Format,
    JsonBody,
    LooseBody,
    NamedBody,
    PythonBody,
    Reasoning,
    TaggedBody,
)

AUTO, NONE = "auto", "none"
DESCRIBED = "response_template"  # the name of a format that the checkpoint itself describes
_THINK = Reasoning("<think>", "</think>", ends_at_calls=True)
_BRACKETS = Reasoning("[THINK]", "[/THINK]")
_THOUGHT = Reasoning("<|channel>thought\n", "<channel|>")
_REASONINGS = (_THINK, _BRACKETS, _THOUGHT)

_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


class UnknownFormatError(InvalidInput):
    """No built-in format has this name."""


@dataclass(frozen=True)
class _Known:
    """A built-in format, chosen where a chat template has all of `says`."""

    format: Format
    says: tuple[str, ...]


def _deepseek(name: str, headers: tuple[str, ...], footer: str) -> Format:
    calls = Calls(
        NamedBody(headers, footer),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )
    return Format(name, calls, markers=_DEEPSEEK_MARKERS)


def _dsml(name: str, section: str, space: str) -> Format:
    """Tags of DeepSeek's own, with `｜DSML｜` as one token in each."""
    tag = "｜DSML｜" + space
    body = TaggedBody(
        header=f'<{tag}invoke name="{{name}}">\n',
        before=f'<{tag}parameter name="{{key}}" string="{{string}}">',
        after=f"</{tag}parameter>\n",
        footer=f"</{tag}invoke>\n",
        newlines=False,
    )
    calls = Calls(body, section=(f"<{tag}{section}>\n", f"</{tag}{section}>"))
    return Format(name, calls, markers=("｜DSML｜",))


def _pair(text: str) -> tuple[str, str]:
    return text, text.replace("<", "</", 1)


_TABLE = (
    _Known(_dsml("deepseek-v4.1", "calls", " "), ("｜DSML｜ calls",)),
    _Known(_dsml("deepseek-v4", "tool_calls", ""), ("｜DSML｜", "tool_calls>")),
    _Known(_dsml("deepseek-v3.2", "function_calls", ""), ("｜DSML｜", "function_calls")),
    _Known(
        _deepseek("deepseek-v3", ("function<｜tool▁sep｜>{name}\n```json\n",), "\n```"),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    _Known(_deepseek("deepseek-v3.1", ("{name}<｜tool▁sep｜>",), ""), ("<｜tool▁calls▁begin｜>",)),
    _Known(
        Format(
            "qwen3-coder",
            Calls(
                TaggedBody(
                    header="\n<function={name}>\n",
                    before="<parameter={key}>\n",
                    after="\n</parameter>\n",
                    footer="</function>\n",
                    newlines=True,
                ),
                call=_pair("<tool_call>"),
            ),
        ),
        ("<function=", "<tool_call>"),
    ),
    _Known(
        Format(
            "glm",
            Calls(
                TaggedBody(
                    header="{name}\n",
                    before="<arg_key>{key}</arg_key>\n<arg_value>",
                    after="</arg_value>\n",
                    footer="",
                    newlines=False,
                ),
                call=_pair("<tool_call>"),
            ),
            markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        ("<arg_key>", "<tool_call>"),
    ),
    _Known(
        Format(
            "kimi-k2",
            Calls(
                NamedBody(
                    (
                        "functions.{name}:{number}<|tool_call_argument_begin|>",
                        "{name}:{number}<|tool_call_argument_begin|>",
                    )
                ),
                call=("<|tool_call_begin|>", "<|tool_call_end|>"),
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                ids=CallIds.NUMBERED,
            ),
            markers=("<|tool_call_argument_begin|>",),
        ),
        ("<|tool_calls_section_begin|>",),
    ),
    _Known(
        Format(
            "kimi-k3",
            Calls(
                TaggedBody(
                    header='call tool="{name}" index="{number}"<|sep|>',
                    before='<|open|>argument key="{key}" type="{type}"<|sep|>',
                    after="<|close|>argument<|sep|>",
                    footer="",
                    newlines=False,
                    attributes=True,
                ),
                call=("<|open|>", "<|close|>call<|sep|>"),
                section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
                around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
                last="<|close|>message<|sep|>",
            ),
            Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>", ends_at_calls=True),
            markers=("<|open|>", "<|close|>", "<|sep|>"),
        ),
        ("<|open|>", "<|sep|>"),
    ),
    _Known(
        Format(
            "gpt-oss",
            Channels(
                channel="<|channel|>",
                message="<|message|>",
                end="<|end|>",
                start="<|start|>",
                role="assistant",
                thoughts="analysis",
                calls="commentary",
                answer="final",
                recipient=" to=functions.{name}",
                form=" <|constrain|>json",
            ),
            markers=("<|constrain|>",),
        ),
        ("<|channel|>", "<|message|>"),
    ),
    _Known(
        Format(
            "gemma4",
            Calls(LooseBody("call:{name}", '<|"|>'), call=("<|tool_call>", "<tool_call|>")),
            markers=('<|"|>', "<|channel>"),
        ),
        ("<|tool_call>", "<tool_call|>"),
    ),
    _Known(
        Format(
            "functiongemma",
            Calls(
                LooseBody("call:{name}", "<escape>"),
                call=("<start_function_call>", "<end_function_call>"),
            ),
            markers=("<escape>",),
        ),
        ("<start_function_call>",),
    ),
    _Known(
        Format("hermes", Calls(JsonBody(), call=_pair("<tool_call>"))),
        ("<tool_call>",),
    ),
    _Known(
        Format(
            "mistral",
            Calls(
                NamedBody(("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}")),
                call=("[TOOL_CALLS]", ""),
                ids=CallIds.NINE,
            ),
            markers=("[ARGS]", "[CALL_ID]"),
        ),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    _Known(
        Format(
            "mistral-list",
            Calls(JsonBody(listed=True), call=("[TOOL_CALLS]", ""), ids=CallIds.NINE),
        ),
        ("[TOOL_CALLS]",),
    ),
    _Known(
        Format(
            "lfm2",
            Calls(PythonBody(), section=("<|tool_call_start|>", "<|tool_call_end|>")),
        ),
        ("<|tool_call_start|>",),
    ),
    _Known(
        Format(
            "phi4",
            Calls(JsonBody(listed=True), section=("<|tool_call|>", "<|/tool_call|>")),
        ),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    _Known(
        Format("granite", Calls(JsonBody(listed=True), call=("<|tool_call|>", ""))),
        ("<|tool_call|>",),
    ),
    _Known(
        Format(
            "llama4",
            Calls(PythonBody(), section=("<|python_start|>", "<|python_end|>"), bare="["),
        ),
        ("<|header_start|>", "tools"),
    ),
    _Known(
        Format(
            "llama3",
            Calls(
                JsonBody(arguments="parameters", separator="; "),
                call=("<|python_tag|>", ""),
                bare="{",
            ),
        ),
        ("<|start_header_id|>", "tools", '"parameters"'),
    ),
)
FORMATS = {known.format.name: known.format for known in _TABLE}


def choose_format(template: str | None, wanted: str = AUTO, described: Any = None) -> Format:
    """The format of a model by its chat template, or the one of this name.

    A block of reasoning is known where the template names its markers.

    Args:
        described: the checkpoint's `response_template`. Unless a name is given, what it says of
            calls and reasoning goes before what the chat template does.

    Raises:
        UnknownFormatError: `wanted` is neither `auto`, `none` nor built in.
    """
    if wanted == NONE:
        return Format(NONE)
    source = template or ""
    reasoning = next((each for each in _REASONINGS if each.end in source), None)
    if wanted != AUTO:
        try:
            return _with(FORMATS[wanted], reasoning)
        except KeyError:
            names = ", ".join((AUTO, NONE, *FORMATS))
            raise UnknownFormatError(f"output_format must be one of {names}") from None
    reasoning = reasoning_of(described) or reasoning
    calls = calls_of(described)
    if calls is not None:
        known_as = [form.name for form in FORMATS.values() if form.calls == calls]
        return Format([*known_as, DESCRIBED][0], calls, reasoning)
    for known in _TABLE:
        if all(text in source for text in known.says):
            return _with(known.format, reasoning)
    return Format(NONE, reasoning=reasoning)


def _with(form: Format, reasoning: Reasoning | None) -> Format:
    """A format with the reasoning that a template has, if it has none of its own."""
    return form if form.reasoning is not None else replace(form, reasoning=reasoning)
