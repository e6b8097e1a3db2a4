"""From constraints to grammars and matchers, by llguidance: only workers import this.

Whatever a client can send is either compiled within the bounds below or refused in words: a keyword
that llguidance cannot enforce is named, never dropped in silence.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer

from radixgrove.protocol.constraints.constraint import (
    TOO_COMPLEX,
    UNSATISFIABLE,
    Constraint,
    ConstraintError,
    Form,
    Tags,
    check_levels,
    json_schema,
)
from radixgrove.protocol.constraints.numbers import fitted
from radixgrove.protocol.constraints.place import place_of
from radixgrove.protocol.constraints.rewrite import misspelt, precise, rewrite
from radixgrove.protocol.constraints.schema import check_properties, has_value
from radixgrove.protocol.token_bytes import BYTE_LEVEL, TokenBytes, decoder_of, steps_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


# A row of 10,000 items holds an object of 2,400 optional properties; a state of a lexer takes one
# or two kilobytes, and a unit of work some 20 ns. Errors are for clients: without the parser's
# state.
def _limits(states: int, work: int) -> LLParserLimits:
    """`work`: units in a step."""
    return LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=work,
        step_max_items=100_000,
        max_lexer_states=states,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


LIMITS = _limits(50_000, 200_000)
# Of a matcher that one answer has for itself, after a shared lexer had met too much, or the answer
# could be read in too many ways. What such ways take of memory grows with the square of the work:
# 50 MB here, 300 MB at twice as much.
LONG_LIMITS = _limits(150_000, 500_000)
# llguidance follows rules and references by recursion: the longest chains that fit the bounds need
# some 30 MiB of stack, and would end the process on an ordinary one.
_STACK_BYTES = 128 << 20
_MOST_REASON = 300  # characters of llguidance's words that are passed on
_UNKNOWN_TOKENIZER = "this model's tokenizer does not support it"
_TOKENS_COMPARED = 500

_OPTIONS = "x-guidance"  # llguidance reads its own options there, which are ours to give
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_FORMAT = "Unknown format"
_ONE_OF = "oneOf"
_COUNTED = "min/maxProperties only supported"
_COUNTS = ("minProperties", "maxProperties")
_REGEX_REASON = re.compile(r"^error: (.*)$", re.MULTILINE)
_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n")  # of one line
_COMPLEX = re.compile(r"too (?:big|complex|large|many)|limit|fuel", re.IGNORECASE)
_INVALID_EXPRESSION = "a regular expression is not valid here"
# llguidance's words for what has a plainer name.
_PLAIN = (
    (
        re.compile(r"Resource '(?:json-schema:///)?(.*)' is not present in a registry.*"),
        r"'$ref' must be local ('#/…'), and '\1' is not: nothing is fetched",
    ),
    (re.compile(r"((?:Pointer|Anchor) '.*' does not exist)"), r"'$ref' leads nowhere: \1"),
    (
        re.compile(r".*lookarounds not supported yet; \w+ in regex (/.*)"),
        rf"{_INVALID_EXPRESSION}: \\b, \\B, and ^ or $ within it, are not supported: \1",
    ),
    (
        re.compile(r"panic: assertion failed: grammar\.symbols\.len\(\) .*"),
        r"the grammar has too many symbols",
    ),
    (re.compile(r"Expected f64 (.*)"), r"Expected a number \1"),
    (
        re.compile(r"lexer error: too many expressions constructed"),
        r"there are too many ways to read the answer, as where a repeated part may end in several "
        r"places",
    ),
)
# What an error repeats of the client's own words.
_REPEATED = re.compile(
    r"'[^']*'|\"[^\"]*\"|`[^`]*`"
    r"|(?<=Invalid type: ).*|(?<=unknown name: ).*|(?<=not supported: ).*"
)
# Clients write these texts: each expression takes time by their length, not by its square. So blank
# lines are no part of a rule's beginning, and what is opened and never closed reaches to the end.
_GBNF_RULE = re.compile(r"^[^\S\n]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
# Of GBNF: what may hold a name without meaning it, and names.
_GBNF_NAME = re.compile(
    r'"(?:[^"\\]|\\[\s\S])*"?|\[(?:[^\]\\]|\\[\s\S])*\]?|#[^\n]*|[A-Za-z][\w-]*'
)
_LARK_RULE = re.compile(r"^[^\S\n]*[?!]?[A-Za-z_][^\s:]*\s*:", re.MULTILINE)
# In a Lark grammar: what may hold the word without meaning it, then the word itself.
_EMBEDDED = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|/(?:[^/\\]|\\[\s\S])+/?|%json\s*(?=\{)')


class UnenforceableError(ConstraintError):
    """A keyword of a schema that must be enforced cannot be; the reason names it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint as llguidance takes it, whatever the tokenizer."""

    grammar: str
    ignored: tuple[str, ...]  # keywords of a JSON schema that are not enforced


def compiler_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads to compile what clients send: nowhere else is the stack large enough."""
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    started = threading.Barrier(count)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(count):  # each blocks a thread until all are there
            threads.submit(started.wait)
    finally:
        threading.stack_size(before)
    return threads


def load_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """What matchers know of a model's tokens; takes some tenths of a second.

    Args:
        vocab_size: masks have a bit for each id below it, and for all that the tokenizer has.
        eos_ids: tokens that may end an answer.

    Raises:
        ConstraintError: llguidance does not know this kind of tokenizer.
    """
    own = tokenizer.to_str()
    decoder = decoder_of(own)
    text = _with_plain_decoder(own, decoder)
    eos = list(eos_ids) or None
    try:
        found = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError:
        try:  # it may have more tokens than the model
            found = LLTokenizer(text, eos_token=eos)
        except ValueError as error:
            raise ConstraintError(_UNKNOWN_TOKENIZER) from error
    if not _agree(found, tokenizer, TokenBytes(tokenizer, decoder)):
        raise ConstraintError(_UNKNOWN_TOKENIZER)
    return found


def _with_plain_decoder(text: str, decoder: dict[str, Any] | None) -> str:
    """A `tokenizer.json` that llguidance reads rightly: in a sequence it may look past `ByteLevel`,
    and would then take each character that stands for a byte for itself.
    """
    steps = steps_of(decoder, "decoder")
    byte_level = [step for step in steps if step["type"] == BYTE_LEVEL]
    if not byte_level or len(steps) == 1:
        return text
    return msgspec.json.encode({**msgspec.json.decode(text), "decoder": byte_level[0]}).decode()


def _agree(found: LLTokenizer, tokenizer: Tokenizer, tokens: TokenBytes) -> bool:
    """Whether both know some hundreds of tokens, from all over the vocabulary, as the same bytes.

    Else a text that a matcher has accepted would not be what its tokens decode to.
    """
    size = tokenizer.get_vocab_size()
    sample = (
        token
        for token in range(0, size, max(1, size // _TOKENS_COMPARED))
        if tokenizer.id_to_token(token) is not None and not found.is_special_token(token)
    )
    return all(found.decode_bytes([token]) == tokens.of(token) for token in sample)


def compile_constraint(constraint: Constraint, tokenizer: LLTokenizer, whitespace: int) -> Compiled:
    """Compile a constraint, and its first mask; in one of `compiler_threads`.

    Args:
        whitespace: most characters of white space between two tokens of JSON.

    Raises:
        ConstraintError: it is malformed, cannot be enforced, has no answer, or is too complex.
    """
    slips: dict[str, str] = {}
    match constraint.form:
        case Form.JSON_SCHEMA:
            return _compile_schema(constraint, tokenizer, whitespace)
        case Form.TAGS:
            return _compile_tags(constraint, tokenizer, whitespace)
        case Form.REGEX:
            grammar = LLMatcher.grammar_from_regex(constraint.text)
        case Form.CHOICE:
            texts = msgspec.json.decode(constraint.text, type=list[str])
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
        case Form.GRAMMAR:
            lark, slips = _lark(constraint.text, whitespace)
            grammar = LLMatcher.grammar_from_lark(lark)
    found = compile_grammar(grammar, tokenizer)
    return Compiled(grammar, (*slips, *found.ignored))


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> Compiled:
    """As `compile_constraint`, of a grammar that llguidance takes."""
    matcher = build_matcher(grammar, tokenizer)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(matcher.get_error())
    return Compiled(grammar, _ignored(matcher.get_grammar_warnings(), grammar))


def _compile_schema(constraint: Constraint, tokenizer: LLTokenizer, whitespace: int) -> Compiled:
    schema = _checked(constraint.text)
    slips = misspelt(schema)
    if constraint.strict and slips:
        meant = ", ".join(f"'{key}' is no keyword ('{rule}' is)" for key, rule in slips.items())
        raise UnenforceableError(f"it is strict, but {meant}")
    try:
        found = _compile_keywords(schema, tokenizer, whitespace, enforce_all=constraint.strict)
    except ConstraintError as error:
        place = None if error.code else place_of(schema, error.reason)
        if place is None:
            raise
        raise ConstraintError(f"{error.reason} (at {_cut(place)})") from None
    return Compiled(found.grammar, (*slips, *found.ignored))


def _compile_keywords(
    schema: dict[str, Any], tokenizer: LLTokenizer, whitespace: int, *, enforce_all: bool
) -> Compiled:
    """A schema as it stands; if that cannot be enforced whole, in other words; if that cannot
    either and it need not be, without some keywords."""

    def compiled(schema: dict[str, Any], *, strict: bool) -> Compiled:
        options = _options(whitespace, strict=strict)
        schema, removed = fitted(schema)
        if strict and removed:
            raise UnenforceableError(f"it is strict, but {_removed(removed)}")
        try:  # as text: llguidance takes no whole number of more than 64 bits from Python
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise ConstraintError(_first(str(error))) from None
        whole = compile_grammar(grammar, tokenizer)
        return Compiled(whole.grammar, tuple(dict.fromkeys((*removed, *whole.ignored))))

    try:
        return compiled(schema, strict=True)
    except UnenforceableError as error:
        unenforceable = error
    other = rewrite(schema)
    differs = other != schema
    if differs:
        try:
            return compiled(other, strict=True)
        except ConstraintError as error:
            if error.code == UNSATISFIABLE:
                raise
            if isinstance(error, UnenforceableError):
                unenforceable = error  # what is in the way once the rest is said otherwise
    if enforce_all:
        raise unenforceable
    if differs:
        with suppress(ConstraintError):
            return compiled(other, strict=False)
    return compiled(schema, strict=False)


def build_matcher(grammar: str, tokenizer: LLTokenizer, *, long: bool = False) -> LLMatcher:
    """A matcher at its beginning; made in one of `compiler_threads`.

    Args:
        long: it is for one answer that is long already.

    Raises:
        ConstraintError: the grammar is not one, or too complex.
    """
    limits = LONG_LIMITS if long else LIMITS
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise refusal(matcher.get_error())
    return matcher


_OUTGROWN = ("too many states", "too many expressions")
_REJECTED = "doesn't satisfy the grammar"


def outgrown(error: str) -> bool:
    """Whether llguidance's error of a matcher that followed what its masks allow is that its lexer
    has too many states: within a token it says that the token is not allowed.

    A lexer keeps all that it has met, most of it places that an answer might have come to. One
    built anew has met nothing, and meets less in following an answer that is there.
    """
    return any(words in error for words in (*_OUTGROWN, _REJECTED))


def refusal(error: str) -> ConstraintError:
    """llguidance's error in words for clients."""
    if _REJECTED in error:
        error = f"lexer error: {_OUTGROWN[0]}"
    if found := _UNIMPLEMENTED.search(error):
        keys = _quoted(msgspec.json.decode(found[1], type=list[str]))
        return UnenforceableError(f"it is strict, but {keys} cannot be enforced")
    if "oneOf constraints are not supported" in error:
        return UnenforceableError(
            "it is strict, but a 'oneOf' of branches that may hold at once cannot be enforced"
        )
    if error.startswith(_COUNTED):
        return UnenforceableError(
            "it is strict, but 'minProperties' and 'maxProperties' cannot be enforced where "
            "properties may be left out"
        )
    if error.startswith(_FORMAT):
        return UnenforceableError(f"it is strict, but 'format' cannot be enforced: {_first(error)}")
    if error.startswith(("Unsatisfiable schema", "NoExtension")):
        return ConstraintError(_first(error), UNSATISFIABLE)
    if _COMPLEX.search(_REPEATED.sub("", _first(error))):
        return ConstraintError(_first(error), TOO_COMPLEX)
    if reason := _REGEX_REASON.search(error):
        expression = _REGEX.search(error)
        shown = f": /{expression[1]}/" if expression else ""
        return ConstraintError(_cut(f"{_INVALID_EXPRESSION}: {reason[1]}{shown}"))
    return ConstraintError(_first(error))


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys)


def _removed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"'{key}' cannot be enforced: {why}" for key, why in reasons.items())


def _first(error: str) -> str:
    """The first line, in plain words."""
    line = error.partition("\n")[0]
    for expression, words in _PLAIN:
        if found := expression.fullmatch(line):
            line = found.expand(words)
    return _cut(line)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_REASON else text[:_MOST_REASON] + "…"


def _ignored(warnings: Iterable[str], grammar: str) -> tuple[str, ...]:
    """The keywords that warnings name, each once."""
    names: dict[str, None] = {}
    for warning in warnings:
        if found := _UNIMPLEMENTED.search(warning):
            names.update(dict.fromkeys(msgspec.json.decode(found[1], type=list[str])))
        elif warning.startswith(_FORMAT):
            names["format"] = None
        elif warning.startswith(_ONE_OF):
            names[_ONE_OF] = None
        elif warning.startswith(_COUNTED):
            names.update(dict.fromkeys(key for key in _COUNTS if f'"{key}"' in grammar))
        else:
            raise ConstraintError(_first(warning))  # never in silence
    return tuple(names)


def _options(whitespace: int, *, strict: bool) -> JsonCompileOptions:
    options: JsonCompileOptions = {"lenient": not strict, "coerce_one_of": not strict}
    if whitespace:
        options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{0,{whitespace}}}"
    else:
        options["whitespace_flexible"] = False
    return options


def _checked(text: str) -> dict[str, Any]:
    """A schema without options of llguidance, its formats precise.

    Raises:
        ConstraintError: it is no JSON, too large or too deep, or surely has no value.
    """
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ConstraintError("the schema is not valid JSON") from None
    check_levels(text.encode())
    check_properties(schema)
    if not has_value(schema):
        raise ConstraintError("no value satisfies the schema", UNSATISFIABLE)
    if not isinstance(schema, dict):
        return {}  # true: any value
    schema.pop(_OPTIONS, None)
    checked: dict[str, Any] = precise(schema)
    return checked


def _compile_tags(constraint: Constraint, tokenizer: LLTokenizer, whitespace: int) -> Compiled:
    """Free text with tags. A trigger may be one of the model's own tokens, which text never
    holds."""
    tags = msgspec.json.decode(constraint.text, type=Tags)
    check_properties([msgspec.json.decode(tag.schema) for tag in tags.structures])
    lines = ["%llguidance {}", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    ignored: dict[str, None] = {}
    for number, tag in enumerate(tags.structures):
        schema = json_schema(bytes(tag.schema), constraint.param)
        try:
            found = _compile_schema(schema, tokenizer, whitespace)
        except ConstraintError as error:
            raise ConstraintError(f"in structures[{number}] {error.reason}", error.code) from None
        ignored.update(dict.fromkeys(found.ignored))
        (part,) = json.loads(found.grammar)["grammars"]
        value = f"%json {json.dumps(part['json_schema'])}"
        trigger = max((t for t in tags.triggers if tag.begin.startswith(t)), key=len)
        begin = tag.begin[len(trigger) :]
        body = " ".join([*_literal(begin), value, *_literal(tag.end)])
        token = token_of(trigger, tokenizer)
        if token is not None:
            lines.append(f"tag_{number}: TEXT <[{token}]> {body}")
        else:
            lines.append(f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{number}: trigger_{number} {body}")
    names = " | ".join(f"tag_{number}" for number in range(len(tags.structures)))
    lines.append(f"start: ({names})* rest")
    whole = compile_grammar(LLMatcher.grammar_from_lark("\n".join(lines)), tokenizer)
    return Compiled(whole.grammar, tuple(ignored))


def _literal(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def token_of(text: str, tokenizer: LLTokenizer) -> int | None:
    """The token of a text like `<tool_call>`, if it is one that no other text makes."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None


def _without_start(gbnf: str) -> str:
    """With another name for a rule `start`, which in Lark is the root's."""
    taken = set(re.findall(r"begin_\d+", gbnf.replace("-", "_").lower()))
    name = next(name for name in map("begin_{}".format, itertools.count()) if name not in taken)
    return _GBNF_NAME.sub(lambda found: name if found[0] == "start" else found[0], gbnf)


def _lark(text: str, whitespace: int) -> tuple[str, dict[str, str]]:
    """A Lark grammar of a Lark or GBNF one, with our options in the schemas that it embeds; and
    what is `misspelt` in those.

    Raises:
        ConstraintError: it is neither, or a schema in it is malformed.
    """
    lark = text
    if _GBNF_RULE.search(text):
        try:
            lark = gbnf_to_lark(_without_start(text))
        except Exception as error:  # the converter raises bare Exception
            raise ConstraintError(f"it is not valid GBNF: {_first(str(error))}") from error
    elif not _LARK_RULE.search(text):
        raise ConstraintError("it is neither Lark nor GBNF")
    decoder = json.JSONDecoder()
    parts, end = [], 0
    slips: dict[str, str] = {}
    for found in _EMBEDDED.finditer(lark):
        if not found[0].startswith("%json") or found.start() < end:
            continue
        try:
            _, after = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            raise ConstraintError("a schema after %json is not valid JSON") from None
        schema = _checked(lark[found.end() : after])
        slips |= misspelt(schema)
        checked, removed = fitted(schema)
        if removed:
            raise ConstraintError(f"in a schema after %json {_removed(removed)}")
        parts += [
            lark[end : found.end()],
            json.dumps(checked | {_OPTIONS: _options(whitespace, strict=False)}),
        ]
        end = after
    return "".join([*parts, lark[end:]]), slips
