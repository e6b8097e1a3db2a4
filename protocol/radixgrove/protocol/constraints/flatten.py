"""A Lark grammar without recursion as one regular expression.

Inside a JSON string a text is escaped, which an expression can follow character by character and a
lexer of terminals cannot: `\\n` and `\\"` begin alike.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from radixgrove.protocol.constraints.constraint import (
    MAX_TEXT_BYTES,
    TOO_COMPLEX,
    Constraint,
    ConstraintError,
    Form,
)

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f]+|//[^\n]*)
    |(?P<line>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[?!]?[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<directive>%[a-z]+)
    |(?P<op>->|\.\.|[|()\[\]?*+~:.,])""",
    re.VERBOSE,
)
_COMMON = {
    "CNAME": r"[A-Za-z_][A-Za-z0-9_]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "HEXDIGIT": r"[0-9A-Fa-f]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_Token = tuple[str, str]  # its kind, and its text


def expression_of(lark: str) -> str:
    """The regular expression of the grammar's texts.

    Raises:
        ConstraintError: it is no Lark grammar, refers to itself, or has what an expression has not.
    """
    try:
        return _Grammar(lark).rule("start", ())
    except RecursionError:
        raise ConstraintError("its rules are nested too deeply", TOO_COMPLEX) from None


def text_expression(given: Constraint) -> str:
    """A constraint of a text by an expression or a grammar, as one regular expression of all of it.

    Raises:
        ConstraintError: as `expression_of`.
    """
    if given.form is Form.REGEX:
        return f"(?:{given.text})"
    return expression_of(given.text)


class _Grammar:
    def __init__(self, lark: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._known: dict[str, str] = {}
        for line in _statements(lark):
            self._read(line)

    def _read(self, line: list[_Token]) -> None:
        kind, text = line[0]
        if kind == "directive":
            self._import(line)
            return
        if kind != "name":
            raise ConstraintError(f"no rule begins with {text[:32]!r}")
        rest = line[1:]
        if [text for _, text in rest[:1]] == ["."]:  # a priority, which says nothing of texts
            rest = rest[2:]
        if not rest or rest[0][1] != ":":
            raise ConstraintError(f"after the name {text[:64]!r} there must be a ':'")
        self._rules[text.lstrip("?!")] = rest[1:]

    def _import(self, line: list[_Token]) -> None:
        texts = [text for _, text in line]
        if texts[:3] != ["%import", "common", "."] or len(texts) not in (4, 6):
            raise ConstraintError(f"{' '.join(texts)[:64]!r} cannot be enforced in a JSON string")
        name = texts[3]
        if name not in _COMMON:
            raise ConstraintError(f"'common' has no {name[:64]!r} here")
        self._known[texts[-1]] = f"(?:{_COMMON[name]})"

    def rule(self, name: str, above: tuple[str, ...]) -> str:
        """The expression of a rule, a group."""
        if name in self._known:
            return self._known[name]
        if name in above:
            raise ConstraintError(
                f"the rule {name!r} refers to itself, which cannot be enforced in a JSON string"
            )
        if name not in self._rules:
            raise ConstraintError(f"there is no rule {name[:64]!r}")
        reader = _Reader(self, self._rules[name], (*above, name))
        found = reader.alternatives()
        if reader.rest:
            raise ConstraintError(f"{reader.rest[0][1][:32]!r} is not expected in {name!r}")
        self._known[name] = found
        return found


class _Reader:
    """Reads the body of one rule."""

    def __init__(self, grammar: _Grammar, body: list[_Token], above: tuple[str, ...]) -> None:
        self._grammar = grammar
        self.rest = deque(body)
        self._above = above

    def alternatives(self) -> str:
        return f"(?:{'|'.join(_bounded(self._sequences()))})"

    def _sequences(self) -> Iterator[str]:
        yield self._sequence()
        while self._skip("|"):
            yield self._sequence()

    def _sequence(self) -> str:
        return "".join(_bounded(self._items()))

    def _items(self) -> Iterator[str]:
        while self.rest and self.rest[0][1] not in ("|", ")", "]"):
            if self._skip("->"):
                self._next("name")
            else:
                yield self._repeated(self._item())

    def _item(self) -> str:
        kind, text = self.rest.popleft()
        if text in ("(", "["):
            found = self.alternatives()
            if not self._skip(")" if text == "(" else "]"):
                raise ConstraintError(f"{text!r} is not closed")
            return found if text == "(" else f"{found}?"
        if kind == "string":
            return self._string(text)
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            if not set(flags) <= set("imsu"):
                raise ConstraintError(f"{text[:32]!r} has a flag that is not supported")
            return f"(?{flags.replace('u', '')}:{body})"
        if kind == "name":
            return self._grammar.rule(text, self._above)
        raise ConstraintError(f"{text[:32]!r} is not expected")

    def _string(self, text: str) -> str:
        value = _unquoted(text)
        if self._skip(".."):
            last = _unquoted(self._next("string"))
            if len(value) != 1 or len(last) != 1:
                raise ConstraintError("a range has one character on each side")
            return f"[{re.escape(value)}-{re.escape(last)}]"
        return f"(?{'i' if text.endswith('i') else ''}:{_escaped(value)})"

    def _repeated(self, item: str) -> str:
        while self.rest and self.rest[0][1] in ("?", "*", "+"):
            item = f"(?:{item}{self.rest.popleft()[1]})"
        if self._skip("~"):
            least = most = self._next("number")
            if self._skip(".."):
                most = self._next("number")
            item = f"(?:{item}{{{least},{most}}})"
        return item

    def _skip(self, text: str) -> bool:
        if self.rest and self.rest[0][0] == "op" and self.rest[0][1] == text:
            self.rest.popleft()
            return True
        return False

    def _next(self, kind: str) -> str:
        if not self.rest or self.rest[0][0] != kind:
            raise ConstraintError(f"a {kind} is missing")
        return self.rest.popleft()[1]


def _statements(lark: str) -> Iterator[list[_Token]]:
    """Rules and directives, of which a line that begins with `|` goes on with the one before."""
    statement: list[_Token] = []
    depth = 0
    for kind, text in [*_tokens(lark), ("line", "\n")]:
        if kind == "line":
            statement.append((kind, text))
            continue
        begins = bool(statement) and statement[-1][0] == "line" and not depth
        while statement and statement[-1][0] == "line":
            statement.pop()
        if begins and text != "|" and statement:
            yield statement
            statement = []
        depth += (text in ("(", "[")) - (text in (")", "]"))
        statement.append((kind, text))
    statement = [token for token in statement if token[0] != "line"]
    if statement:
        yield statement


def _tokens(lark: str) -> Iterator[_Token]:
    position = 0
    while position < len(lark):
        found = _TOKEN.match(lark, position)
        if found is None:
            raise ConstraintError(f"{lark[position : position + 16]!r} is not Lark")
        position = found.end()
        assert found.lastgroup is not None
        if found.lastgroup != "blank":
            yield found.lastgroup, found[0]


def _unquoted(text: str) -> str:
    try:
        value = re.sub(
            r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", _character, text.removesuffix("i")[1:-1]
        )
    except KeyError:
        raise ConstraintError(f"{text[:32]} has an escape that is unknown") from None
    return value


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\", "/": "/"}[code]


def _escaped(text: str) -> str:
    return re.escape(text).replace("\n", "n").replace("\t", "t").replace("\r", "r")


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    """The same, as long as they are within the bound together."""
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_TEXT_BYTES:
            raise ConstraintError(
                f"as an expression it has more than {MAX_TEXT_BYTES} bytes", TOO_COMPLEX
            )
        yield part
