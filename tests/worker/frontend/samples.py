"""The same turn as each family of models writes it, and how tests read what comes of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.formats.shapes import Format, Reasoning
from radixgrove.protocol.formats.table import FORMATS
from radixgrove.worker.frontend import events
from radixgrove.worker.frontend.call_reader import Properties
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.output import Content, OutputParser, Part

PROPERTIES: dict[str, dict[str, Any]] = {
    "weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object"},
    },
    "now": {},
    "patch": {"input": {"type": "string"}},
}
OFFERED: Properties = {
    name: {key: Values({}).types(part) for key, part in properties.items()}
    for name, properties in PROPERTIES.items()
}
# Two calls, with what is easily lost: quotes, line breaks, other alphabets, a marker as text.
TEXT = 'A "fine"\nday in Zürich 🌶, not </tool_call>'
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": TEXT, "days": 3, "where": {"a": [1, True, None, "}"]}}),
    ("now", {}),
]
ARGUMENTS = json.dumps(CALLS[0][1], ensure_ascii=False)
_PYTHON = (
    "[weather(city='A \"fine\"\\nday in Zürich 🌶, not </tool_call>', days=3, "
    "where={'a': [1, True, None, '}']}), now()]"
)
_LOOSE = f"call:weather{{city:QT{TEXT}QT,days:3,where:{{a:[1,true,null,QT}}QT]}}}}"


def _json(arguments: str = "arguments") -> list[str]:
    return [
        f'{{"name": "weather", "{arguments}": {ARGUMENTS}}}',
        f'{{"name": "now", "{arguments}": {{}}}}',
    ]


def _tagged(template: str, tag: str, end: str) -> str:
    """Both calls; the template has places for name and arguments."""
    where = '{"a": [1, true, null, "}"]}'
    rows = "".join(tag.format(k=k, v=v) for k, v in (("city", TEXT), ("days", 3), ("where", where)))
    return template.format(name="weather", rows=rows) + end + template.format(name="now", rows="")


def _dsml(section: str, space: str) -> str:
    tag = "｜DSML｜" + space
    where = '{"a": [1, true, null, "}"]}'
    rows = "".join(
        f'<{tag}parameter name="{k}" string="{s}">{v}</{tag}parameter>\n'
        for k, s, v in (("city", "true", TEXT), ("days", "false", 3), ("where", "false", where))
    )
    calls = f'<{tag}invoke name="weather">\n{rows}</{tag}invoke>\n'
    calls += f'<{tag}invoke name="now">\n</{tag}invoke>\n'
    return f"<{tag}{section}>\n{calls}</{tag}{section}>"


def _xtml() -> str:
    where = '{"a": [1, true, null, "}"]}'
    rows = "".join(
        f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>'
        for k, t, v in (("city", "string", TEXT), ("days", "number", 3), ("where", "object", where))
    )
    return (
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        f'<|open|>call tool="weather" index="1"<|sep|>{rows}<|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>"
    )


_DEEPSEEK = "<｜tool▁call▁begin｜>%s<｜tool▁call▁end｜>"
SAMPLES: dict[str, str] = {
    "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _json()),
    "qwen3-coder": _tagged(
        "<tool_call>\n<function={name}>\n{rows}</function>\n</tool_call>",
        "<parameter={k}>\n{v}\n</parameter>\n",
        "\n",
    ),
    "glm": _tagged(
        "<tool_call>{name}\n{rows}</tool_call>",
        "<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n",
        "\n",
    ),
    "llama3": "; ".join(_json("parameters")),
    "llama4": _PYTHON,
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral-list": f"[TOOL_CALLS][{', '.join(_json())}]",
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        _DEEPSEEK % f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        for name, arguments in (("weather", ARGUMENTS), ("now", "{}"))
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>"
    + "".join(
        _DEEPSEEK % f"{name}<｜tool▁sep｜>{arguments}"
        for name, arguments in (("weather", ARGUMENTS), ("now", "{}"))
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek-v3.2": _dsml("function_calls", ""),
    "deepseek-v4": _dsml("tool_calls", ""),
    "deepseek-v4.1": _dsml("calls", " "),
    "kimi-k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
        for i, (name, a) in enumerate((("weather", ARGUMENTS), ("now", "{}")))
    )
    + "<|tool_calls_section_end|>",
    "kimi-k3": _xtml(),
    "gemma4": f"<|tool_call>{_LOOSE}<tool_call|><|tool_call>call:now{{}}<tool_call|>".replace(
        "QT", '<|"|>'
    ),
    "functiongemma": (
        f"<start_function_call>{_LOOSE}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>"
    ).replace("QT", "<escape>"),
    "phi4": f"<|tool_call|>[{', '.join(_json())}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{', '.join(_json())}]",
}


def form_of(name: str) -> Format:
    """With a block of thoughts before the answer."""
    return replace(FORMATS[name], reasoning=Reasoning("<think>", "</think>", ends_at_calls=True))


def markers_of(form: Format, *, tokens: bool = True) -> Markers:
    """Of a vocabulary that has the format's markers as tokens, or none of them."""
    tokenizer = Tokenizer(models.BPE())
    if tokens:
        tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False) for text in form.all_markers]
        )
    return Markers(form, tokenizer, ())


@dataclass
class Turn:
    """What parts of an output add up to."""

    reasoning: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    ended: list[int] = field(default_factory=list)  # numbers of calls

    def add(self, parts: Iterable[Part]) -> Turn:
        for part in parts:
            match part:
                case Content():
                    self.text += part.text
                case events.Reasoning():
                    self.reasoning += part.text
                case events.CallBegins():
                    assert part.number == len(self.calls)
                    self.calls.append([part.name, ""])
                case events.CallArguments():
                    assert part.number == len(self.calls) - 1
                    self.calls[-1][1] += part.text
                case events.CallEnds():
                    assert part.number == len(self.calls) - 1
                    self.ended.append(part.number)
        return self

    @property
    def read(self) -> list[tuple[str, Any]]:
        """The calls that are whole."""
        calls = [self.calls[number] for number in self.ended]
        return [(name, json.loads(arguments)) for name, arguments in calls]


def parser_of(
    form: Format,
    markers: Markers,
    *,
    in_reasoning: bool = False,
    offered: Properties | None = OFFERED,
) -> OutputParser:
    return OutputParser(
        form,
        markers,
        offered=offered,
        new_id=lambda name, number: f"{name}{number}",
        in_reasoning=in_reasoning,
    )


def read(
    form: Format,
    markers: Markers,
    pieces: Iterable[str],
    *,
    in_reasoning: bool = False,
    offered: Properties | None = OFFERED,
) -> tuple[Turn, OutputParser]:
    """What comes of an output in these pieces, as a parser takes them."""
    parser = parser_of(form, markers, in_reasoning=in_reasoning, offered=offered)
    turn = Turn()
    for piece in pieces:
        turn.add(parser.feed(piece))
    return turn.add(parser.finish()), parser
