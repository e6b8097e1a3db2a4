"""Tools that a request offers, and what it says of calling them."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from radixgrove.protocol.constraints import constraint as constraints
from radixgrove.protocol.constraints.constraint import Constraint, ConstraintError, Form
from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import ChatBody
from radixgrove.protocol.openai.decoding import misread
from radixgrove.protocol.openai.structured import refused

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 << 10  # of all definitions together, as JSON
MAX_LEVELS = constraints.MAX_SCHEMA_LEVELS + 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
INVALID_PARAMETERS = "invalid_function_parameters"
INPUT = "input"  # the one argument of a custom tool, as models see it
_SYNTAXES = {"lark": Form.GRAMMAR, "regex": Form.REGEX}


class ToolMode(StrEnum):
    """Whether the answer is calls."""

    AUTO = "auto"  # calls, a text, or both
    NONE = "none"  # a text
    REQUIRED = "required"  # one call or more
    NAMED = "named"  # one call of the one tool that is offered


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be called, or a custom tool: one that takes a text."""

    name: str
    parameters: str | None  # JSON schema of its arguments; None: it has none
    strict: bool
    param: str  # the schema's field of the request
    custom: bool = False
    input: Constraint | None = None  # what the text of a custom one must be

    @property
    def argument_types(self) -> dict[str, frozenset[str]]:
        """Types that its arguments may have (`ALL_TYPES`) by their names, as far as the schema
        lists them."""
        schema = msgspec.json.decode(self.parameters) if self.parameters is not None else {}
        values = Values(schema)
        found = values.members().get("properties")
        if not isinstance(found, dict):
            return {}
        return {name: values.types(part) for name, part in found.items()}


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of tools."""

    # All, as they came; custom ones as functions, which templates know. The template shows these.
    definitions: list[dict[str, Any]]
    size: int  # bytes of these, as JSON
    offered: tuple[Tool, ...]  # those that may be called
    mode: ToolMode
    parallel: bool  # an answer may have several calls


class _Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class _GrammarText(msgspec.Struct, kw_only=True):
    definition: str
    syntax: str


class _InputFormat(msgspec.Struct, kw_only=True):
    type: str
    grammar: _GrammarText | None = None


class _Custom(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    format: _InputFormat | None = None


class _Named(msgspec.Struct, kw_only=True):
    name: str


class _Reference(msgspec.Struct, kw_only=True):
    """A tool of a choice, under its type as chat has it or beside `type`."""

    type: str = "function"
    function: _Named | None = None
    custom: _Named | None = None
    name: str | None = None

    @property
    def called(self) -> str | None:
        """The tool's name.

        Raises:
            ApiError: 400, for another type of tool.
        """
        if self.type not in ("function", "custom"):
            raise errors.invalid(
                "Invalid value for 'tool_choice': its types are function, custom and "
                f"allowed_tools, not '{errors.shorten(self.type, 64)}'.",
                "tool_choice",
            )
        named = self.function or self.custom
        return named.name if named is not None else self.name


class _Allowed(msgspec.Struct, kw_only=True):
    mode: str = "auto"
    tools: list[_Reference] = []


class _Choice(_Reference, kw_only=True):
    allowed_tools: _Allowed | None = None
    mode: str = "auto"
    tools: list[_Reference] | None = None


T = TypeVar("T", _Function, _Custom)


def parse_tools(wire: ChatBody) -> Tools | None:
    """The tools of a request; None: it has none.

    Raises:
        ApiError: 400, naming the parameter.
    """
    choice = wire.tool_choice
    if not wire.tools:
        if choice not in (None, "none", "auto"):
            raise errors.invalid("'tool_choice' needs 'tools'.", "tool_choice")
        return None
    size = _size(wire.tools)
    tools = _definitions(wire.tools)
    mode, names = _chosen(choice, {tool.name for tool in tools})
    return Tools(
        definitions=[
            _as_function(item["custom"], tool) if tool.custom else item
            for item, tool in zip(wire.tools, tools, strict=True)
        ],
        size=size,
        offered=tuple(tool for tool in tools if names is None or tool.name in names),
        mode=mode,
        parallel=wire.parallel_tool_calls is not False and mode is not ToolMode.NAMED,
    )


def _size(given: list[dict[str, Any]]) -> int:
    """Bytes of definitions as JSON, within bounds."""
    if len(given) > MAX_TOOLS:
        raise errors.invalid(
            f"'tools' has more than {MAX_TOOLS} entries.", "tools", constraints.TOO_LARGE
        )
    text = msgspec.json.encode(given)
    if len(text) > MAX_TOOLS_BYTES:
        raise errors.invalid(
            f"'tools' has more than {MAX_TOOLS_BYTES} bytes.", "tools", constraints.TOO_LARGE
        )
    if constraints.levels(text) > MAX_LEVELS:
        raise errors.invalid(
            f"'tools' has more than {MAX_LEVELS} levels.", "tools", constraints.TOO_LARGE
        )
    return len(text)


def _definitions(given: list[dict[str, Any]]) -> list[Tool]:
    tools = [_definition(item, f"tools[{index}]") for index, item in enumerate(given)]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            kind = "custom" if tool.custom else "function"
            raise errors.invalid(
                f"Two tools have the name '{tool.name}'.", f"tools[{index}].{kind}.name"
            )
        seen.add(tool.name)
    return tools


def _definition(item: dict[str, Any], where: str) -> Tool:
    kind = item.get("type", "function")
    if kind == "custom":
        return _custom(_described(item, kind, where, _Custom), f"{where}.custom")
    if kind != "function":
        raise errors.unsupported(
            where, f"'{where}' is neither a function nor custom; other tools are not supported."
        )
    function = _described(item, kind, where, _Function)
    return Tool(
        name=function.name,
        parameters=_parameters(bytes(function.parameters), f"{where}.function.parameters"),
        strict=bool(function.strict),
        param=f"{where}.function.parameters",
    )


def _described(item: dict[str, Any], kind: str, where: str, type: type[T]) -> T:
    """What a definition has under its kind."""
    if kind not in item:
        raise errors.invalid(f"Missing required parameter: '{where}.{kind}'.", where)
    try:
        found = msgspec.json.decode(msgspec.json.encode(item[kind]), type=type)
    except msgspec.ValidationError as error:
        raise misread(error, f"{where}.{kind}") from None
    if not _NAME.fullmatch(found.name):
        raise errors.invalid(
            f"Invalid value for '{where}.{kind}.name': it must have 1 to 128 letters, digits, "
            "'_', '.' or '-'.",
            f"{where}.{kind}.name",
        )
    return found


def _custom(given: _Custom, where: str) -> Tool:
    param = f"{where}.format"
    wanted = given.format or _InputFormat(type="text")
    constraint = None
    if wanted.type == "grammar" and wanted.grammar is not None:
        form = _SYNTAXES.get(wanted.grammar.syntax)
        if form is None:
            raise errors.invalid(
                f"Invalid value for '{param}.grammar.syntax': must be lark or regex.", param
            )
        try:
            constraint = constraints.text_form(form, wanted.grammar.definition, param)
        except ConstraintError as error:
            raise refused(error, param) from None
    elif wanted.type != "text":
        raise errors.invalid(
            f"Invalid value for '{param}': must be of the type text, or grammar with a 'grammar'.",
            param,
        )
    return Tool(
        name=given.name,
        parameters=msgspec.json.encode(_input_schema({"type": "string"})).decode(),
        strict=constraint is not None,
        param=param,
        custom=True,
        input=constraint,
    )


def _input_schema(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _as_function(given: dict[str, Any], tool: Tool) -> dict[str, Any]:
    """A custom tool as models know tools: a function of one text."""
    text = {"type": "string"}
    if tool.input is not None:
        kind = "regular expression" if tool.input.form is Form.REGEX else "Lark grammar"
        text["description"] = f"A text of this {kind}:\n{tool.input.text}"
    function = {"name": tool.name, "parameters": _input_schema(text)}
    if given.get("description") is not None:
        function["description"] = given["description"]
    return {"type": "function", "function": function}


def _parameters(schema: bytes, param: str) -> str | None:
    if schema in (b"", b"null"):
        return None
    try:
        return constraints.json_schema(schema, param).text
    except ConstraintError as error:
        raise refused_parameters(error, param) from None


def refused_parameters(error: ConstraintError, param: str) -> errors.ApiError:
    """The refusal of a schema of arguments as an answer."""
    return refused(ConstraintError(error.reason, error.code or INVALID_PARAMETERS), param)


def _chosen(choice: Any, known: set[str]) -> tuple[ToolMode, set[str] | None]:
    """The mode, and the names of the tools that may be called (None: of all)."""
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str):
        return _mode(choice), None
    try:
        given = msgspec.convert(choice, _Choice)
    except msgspec.ValidationError as error:
        raise misread(error, "tool_choice") from None
    if given.type == "allowed_tools":
        allowed = given.allowed_tools or _Allowed(mode=given.mode, tools=given.tools or [])
        names = {each.called for each in allowed.tools}
        mode = _mode(allowed.mode)
        if mode is ToolMode.NONE:
            raise errors.invalid(
                "Invalid value for 'tool_choice': the mode of allowed_tools must be auto or "
                "required.",
                "tool_choice",
            )
    else:
        names, mode = {given.called}, ToolMode.NAMED
    if not names:
        raise errors.invalid("'tool_choice' allows no tool.", "tool_choice")
    for name in names:
        if name not in known:
            raise errors.invalid(
                "'tool_choice' names no tool of 'tools'"
                + (f": '{errors.shorten(name, 64)}'." if name else "."),
                "tool_choice",
            )
    return mode, {name for name in names if name is not None}


def _mode(text: str) -> ToolMode:
    if text not in ("auto", "none", "required"):
        raise errors.invalid(
            "Invalid value for 'tool_choice': must be one of none, auto, required, or an object "
            "that names tools.",
            "tool_choice",
        )
    return ToolMode(text)
