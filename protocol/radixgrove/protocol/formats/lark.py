"""A grammar of calls as it grows, in Lark's notation: only workers import this."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import TOO_COMPLEX, Constraint, ConstraintError
from radixgrove.protocol.constraints.grammar import compile_constraint, token_of

PLACES = re.compile(r"\{(name|id|number|key|string|type)\}")
OPTIONS = ("x-guidance",)  # of the compiler
OF_ROOTS = ("$defs", "definitions", *OPTIONS)  # what only a schema as a whole has
# Of rules and schemas, in which definitions may come again and again.
_MOST_BYTES = 4 << 20


class ToolError(ConstraintError):
    """A tool's arguments cannot be held to their schema."""

    def __init__(self, error: ConstraintError, param: str) -> None:
        super().__init__(error.reason, error.code)
        self.param = param


@dataclass(slots=True)
class Lark:
    """A grammar as it grows."""

    tokenizer: LLTokenizer
    whitespace: int  # most characters of it between two tokens of JSON
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    size: int = 0  # of what grows with the tools' schemas

    def literal(self, text: str) -> str:
        """A text of the format: its markers as tokens, the rest as it stands."""
        return " ".join(self._literals(text))

    def _literals(self, text: str) -> Iterable[str]:
        for piece in marked(text, self.tokenizer):
            yield f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)

    def filled(self, text: str, **values: str) -> str:
        """A header with what stands in its places; a number may be any."""
        text = PLACES.sub(lambda place: values.get(place[1], place[0]), text)
        before, found, after = text.partition("{number}")
        if not found:
            return self.literal(text)
        return f"{self.literal(before)} DIGITS {self.literal(after)}"

    def until(self, rule: str, end: str, *, plain: bool = False) -> str:
        """A rule of any text, and the `end` that follows it; `plain`: of a text that does not begin
        like an array or an object."""
        pieces = list(marked(end, self.tokenizer))
        first = pieces[0] if pieces else ""
        text = r"([ \t\r\n]*[^ \t\r\n\[{](.|\n)*)?" if plain else r"(.|\n)*"
        if isinstance(first, int):  # a token, which no text has
            return f"{'PLAIN' if plain else 'TEXT'}? {self.literal(end)}"
        if len(pieces) == 1:
            self.rules.append(f"{rule}[lazy]: /{text}/ {json.dumps(end)}")
            return rule
        self.rules.append(f"{rule.upper()}: /{text}{escaped(first)}/")
        return f"{rule.upper()} {self.literal(end[len(first) :])}"

    def charge(self, size: int) -> None:
        """So many bytes become part of the grammar.

        Raises:
            ConstraintError: it has too many.
        """
        self.size += size
        if self.size > _MOST_BYTES:
            raise ConstraintError("the tools' schemas repeat too much", TOO_COMPLEX)

    def schema(self, name: str, schema: dict[str, Any]) -> str:
        self.charge(len(json.dumps(schema)))
        self.grammars.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def constraint(self, name: str, constraint: Constraint) -> str:
        self.grammars.append(self.compiled(name, constraint))
        return f"@{name}"

    def compiled(self, name: str, constraint: Constraint) -> dict[str, Any]:
        """A constraint as a part of the whole."""
        compiled = compile_constraint(constraint, self.tokenizer, self.whitespace)
        self.ignored.update(dict.fromkeys(compiled.ignored))
        if not compiled.grammar.startswith('{"grammars"'):
            return {"name": name, "lark_grammar": compiled.grammar}
        (part,) = json.loads(compiled.grammar)["grammars"]
        return {key: value for key, value in part.items() if value is not None} | {"name": name}


def marked(text: str, tokenizer: LLTokenizer) -> Iterable[str | int]:
    """A text of a format in pieces: ids of its markers that are tokens, and what is between."""
    start = 0
    for found in re.finditer(r"<[^<>\n]+>|\[/?[A-Z_]+\]|｜DSML｜", text):
        token = token_of(found[0], tokenizer)
        if token is None and "｜DSML｜" in found[0]:
            at = found[0].index("｜DSML｜")
            token = token_of("｜DSML｜", tokenizer)
            begin, end = found.start() + at, found.start() + at + len("｜DSML｜")
        else:
            begin, end = found.span()
        if token is None:
            continue
        if begin > start:
            yield text[start:begin]
        yield token
        start = end
    if start < len(text):
        yield text[start:]


def escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")  # behind its backslash
