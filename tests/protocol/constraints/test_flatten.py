"""Lark grammars as regular expressions."""

from __future__ import annotations

import re

import pytest

from radixgrove.protocol.constraints.constraint import TOO_COMPLEX, ConstraintError
from radixgrove.protocol.constraints.flatten import expression_of

PATCH = r"""
// As coding agents have it.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk
    | "*** Delete File: " filename LF
add_hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""


def takes(lark: str, text: str) -> bool:
    return re.fullmatch(expression_of(lark), text) is not None


def test_a_grammar_of_patches() -> None:
    body = '*** Add File: a b.py\n+print("\\")\n+\n*** Delete File: c\n'
    assert takes(PATCH, f"*** Begin Patch\n{body}*** End Patch")
    assert not takes(PATCH, "*** Begin Patch\n*** End Patch")
    assert not takes(PATCH, f"*** Begin Patch\n{body}x*** End Patch")


@pytest.mark.parametrize(
    ("lark", "texts", "others"),
    [
        ('start: "a"i ["b"] "c"~2..3', ["acc", "Abccc"], ["ac", "abcccc"]),
        ('start: "a".."c" ("," "a".."c")*', ["a", "a,c,b"], ["d", "a,"]),
        ('?start: x -> one | "no"\nx.2: /\\d+/', ["12", "no"], ["x", ""]),
        ('start: (\n  "a"\n  | "b"\n)', ["a", "b"], ["ab"]),
        ('start: "\\"\\\\\\n\\u00e9"', ['"\\\né'], ["x"]),
        ("start: N W\n%import common.INT -> N\n%import common.WS -> W", ["12 \n"], ["12"]),
        ("start: /a.c/s /B/i", ["a\ncb"], ["acb"]),
    ],
)
def test_what_rules_are_made_of(lark: str, texts: list[str], others: list[str]) -> None:
    assert [takes(lark, text) for text in texts] == [True] * len(texts)
    assert [takes(lark, text) for text in others] == [False] * len(others)


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ('start: "(" start ")" | "x"', "refers to itself"),
        ("start: other", "no rule 'other'"),
        ('x: "a"', "no rule 'start'"),
        ('start: "a" %ignore', "not expected"),
        ('start: "a"\n%ignore " "', "cannot be enforced"),
        ('start: "a"\n%import common.NOTHING', "has no 'NOTHING'"),
        ("start: %json {}", "is not Lark"),
        ('start: ("a"', "not closed"),
        ('start: "a")', "not expected"),
        ("start", "must be a ':'"),
        ('start: "\\q"', "escape"),
        ("start: /a b/x", "flag"),
        ('start: "a".."bc"', "range"),
    ],
)
def test_refusals(lark: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(reason)):
        expression_of(lark)


@pytest.mark.parametrize(
    "lark",
    [
        "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60: "x"',
        "start: " + "b " * 20_000 + f'\nb: "{"x" * 20_000}"',
    ],
)
def test_what_is_too_large(lark: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        expression_of(lark)
    assert refused.value.code == TOO_COMPLEX
