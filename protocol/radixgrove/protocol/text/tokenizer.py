"""A model's tokenizer files, and what prompts need to know of them beyond `tokenizers` itself."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import AddedToken, Tokenizer

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.formats.shapes import Format
from radixgrove.protocol.formats.table import AUTO, choose_format
from radixgrove.protocol.text.token_finder import TokenFinder
from radixgrove.protocol.token_bytes import steps_of

# Texts are encoded one at a time: threads of the library's own have nothing to share, and waking
# them costs more than a short text. Read at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "tool_use.jinja"
# What a directory does not have at its top: templates beside the default one.
_PLACES = {TOOL_TEMPLATE: f"additional_chat_templates/{TOOL_TEMPLATE}"}
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"  # of old directories: text → id
# No file of the model: what a worker's setting says of how it writes, where it says anything.
OUTPUT_FORMAT = "radixgrove_output_format"
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    TOOL_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    OUTPUT_FORMAT,
)
MAX_FILE_BYTES = 64 << 20


class TokenizerError(InvalidInput, ValueError):
    """The files do not make a usable tokenizer."""


class GivenTemplateError(TokenizerError):
    """The file in place of the model's template is of no use: the model is not to blame."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"chat_template '{path}': {reason}")


@contextlib.contextmanager
def panics_are_errors() -> Iterator[None]:
    """Around calls into `tokenizers`: its panics are no `Exception`, and would end a server's task.

    Raises:
        TokenizerError: in place of a panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerError(f"the tokenizer failed: {error}") from error


class Prompting(Protocol):
    """Settings that stand in for what a model's directory says."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def output_format(self) -> str: ...


class TokenizerFiles:
    """The files that decide how text becomes token ids, by name; absent ones are left out."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        """
        Raises:
            TokenizerError: `tokenizer.json` is missing, or a file is unknown or too large.
        """
        if TOKENIZER_JSON not in contents:
            raise TokenizerError(f"{TOKENIZER_JSON} is missing")
        for name, content in contents.items():
            if name not in TOKENIZER_FILES:
                raise TokenizerError("not a tokenizer file")
            if len(content) > MAX_FILE_BYTES:
                raise TokenizerError(f"{name} is larger than {MAX_FILE_BYTES} bytes")
        self.contents = contents

    @classmethod
    def load(cls, model_dir: Path, prompting: Prompting | None = None) -> TokenizerFiles:
        """Read them from a Hugging Face directory.

        Raises:
            TokenizerError: one that is needed is missing.
            GivenTemplateError: the template that `prompting` names cannot be read.
        """
        paths = [model_dir / _PLACES.get(name, name) for name in TOKENIZER_FILES]
        contents = {path.name: path.read_bytes() for path in paths if path.is_file()}
        contents.pop(OUTPUT_FORMAT, None)
        if prompting is not None and prompting.output_format != AUTO:
            contents[OUTPUT_FORMAT] = prompting.output_format.encode()
        if prompting is not None and prompting.chat_template is not None:
            contents.pop(TOOL_TEMPLATE, None)
            contents[CHAT_TEMPLATE] = _given_template(prompting.chat_template)
        return cls(contents)

    @cached_property
    def digest(self) -> str:
        """Equal digests mean equal token ids for every request. Lower-case hex of SHA-256."""
        total = sha256()
        for name in TOKENIZER_FILES:
            content = self.contents.get(name)
            if content is not None:
                total.update(f"{name}\0{len(content)}\0".encode() + content)
        return total.hexdigest()

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file's object; empty when the file is absent.

        Raises:
            TokenizerError: it is not a JSON object.
        """
        content = self.contents.get(name)
        if content is None:
            return {}
        try:
            return json_object(content)
        except ValueError as error:
            raise TokenizerError(f"{name} is not a JSON object") from error

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer with the tokens of all files, that neither truncates nor pads.

        Raises:
            TokenizerError: a file is malformed.
        """
        try:
            with panics_are_errors():
                tokenizer = Tokenizer.from_buffer(self.contents[TOKENIZER_JSON])
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{TOKENIZER_JSON} is malformed") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._add_tokens(tokenizer)
        return tokenizer

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Tokens that other files list; where both do, what these say of a token counts."""
        named = [*self.special_texts().values(), *self._unnamed_specials()]
        listed = self.json(TOKENIZER_CONFIG).get("added_tokens_decoder")
        if listed is not None:
            tokens = {number: _added_token(token) for number, token in _by_id(listed).items()}
        else:
            tokens = {
                number: AddedToken(text, normalized=text not in named, special=text in named)
                for text, number in self.json(ADDED_TOKENS).items()
                if isinstance(number, int)
            }
            tokens |= tokenizer.get_added_tokens_decoder()
        tokenizer.add_tokens([token for _, token in sorted(tokens.items())])
        known = {token.content: token for token in tokens.values()}
        tokenizer.add_special_tokens(
            [known.get(text) or AddedToken(text, normalized=False) for text in dict.fromkeys(named)]
        )

    def special_texts(self) -> dict[str, str]:
        """Texts of `bos_token`, `eos_token` … as chat templates name them.

        Raises:
            TokenizerError: a file is malformed.
        """
        config = self.json(TOKENIZER_CONFIG)
        sources = [config]
        if config.get("added_tokens_decoder") is None:  # what replaced the older file
            sources.append(self.json(SPECIAL_TOKENS_MAP))
        texts: dict[str, str] = {}
        for source in sources:
            extra = source.get("extra_special_tokens")
            named = {name: value for name, value in source.items() if name.endswith("_token")}
            for name, value in (named | extra if isinstance(extra, dict) else named).items():
                if text := _text_of(value):
                    texts[name] = text
        return texts

    def _unnamed_specials(self) -> list[str]:
        found: list[str] = []
        for source in (self.json(TOKENIZER_CONFIG), self.json(SPECIAL_TOKENS_MAP)):
            for key in ("extra_special_tokens", "additional_special_tokens"):
                values = source.get(key)
                if isinstance(values, list) and values:
                    found += [text for text in map(_text_of, values) if text]
                    break
        return found

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, the added ones too.

        Raises:
            TokenizerError: a file is malformed.
        """
        return self.tokenizer().get_vocab(with_added_tokens=True)

    @property
    def size(self) -> int:
        """Ids from here on are no token's."""
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's own `eos_token`, if it has one."""
        return self.vocabulary.get(self.special_texts().get("eos_token", ""))

    def chat_template(self) -> str | None:
        """Source of the model's (default) chat template."""
        return self._templates().get("default")

    def tool_template(self) -> str | None:
        """Source of the template of requests with tools, where the model has one of its own."""
        return self._templates().get("tool_use")

    @cached_property
    def format(self) -> Format:
        """How the model writes reasoning and tool calls.

        Raises:
            UnknownFormatError: the setting names none.
        """
        wanted = self.contents.get(OUTPUT_FORMAT, AUTO.encode()).decode("utf-8", "replace")
        described = self.json(TOKENIZER_CONFIG).get("response_template")
        return choose_format(self.tool_template() or self.chat_template(), wanted, described)

    @property
    def capabilities(self) -> list[str]:
        """What requests may ask of the model.

        Raises:
            UnknownFormatError: as `format`.
        """
        source = self.tool_template() or self.chat_template()
        form = self.format
        found = {
            "completions": True,
            "structured_output": True,
            "chat": source is not None,
            "tools": form.calls is not None and "tools" in (source or ""),
            "reasoning": form.reasons,
        }
        return [name for name, there in found.items() if there]

    def _templates(self) -> dict[str, str]:
        """By name; most models have a default one alone."""
        files = {"default": CHAT_TEMPLATE, "tool_use": TOOL_TEMPLATE}
        written = {
            name: self.contents[file].decode("utf-8", "replace")
            for name, file in files.items()
            if file in self.contents
        }
        if written:
            return written
        configured = self.json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(configured, list):  # older files: [{"name": …, "template": …}, …]
            named = {item.get("name"): item.get("template") for item in configured}
        else:
            named = {"default": configured}
        return {name: text for name, text in named.items() if isinstance(text, str)}


def _given_template(path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise GivenTemplateError(path, error.strerror or type(error).__name__) from error
    if len(content) > MAX_FILE_BYTES:
        raise GivenTemplateError(path, f"it is larger than {MAX_FILE_BYTES} bytes")
    return content


def json_object(content: bytes) -> dict[str, Any]:
    """The object in a file of a model, as transformers reads it: with `NaN` and `Infinity`, which
    Python writes and JSON does not have, and behind a byte order mark.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found


def _text_of(token: Any) -> str | None:
    """A token's text; files have it plain or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _by_id(listed: Any) -> dict[int, Any]:
    try:
        return {int(number): token for number, token in listed.items()}
    except (AttributeError, ValueError) as error:
        raise TokenizerError(f"{TOKENIZER_CONFIG}: added_tokens_decoder is malformed") from error


def _added_token(token: Any) -> AddedToken:
    text = _text_of(token)
    if text is None:
        raise TokenizerError(f"{TOKENIZER_CONFIG}: a token of added_tokens_decoder has no text")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    given = {flag: bool(token[flag]) for flag in flags if flag in token}
    return AddedToken(text, **given)


@dataclass(frozen=True)
class SpecialTokens:
    """Where a rendered prompt has control tokens, and where it may be cut.

    The tokenizer itself looks for added tokens first (leftmost, longest) and encodes what lies
    between them on its own, so that no merge crosses one. A cut right before a token of `cuts` thus
    never changes an id.
    """

    ids: dict[str, int]  # the special ones: text → id
    cuts: frozenset[str]
    heads: frozenset[str]  # of these, those that touch no text behind them either
    finder: TokenFinder  # of every added token
    normalized: bool  # some are looked for in normalized text, where we cannot see them

    @classmethod
    def of(cls, tokenizer: Tokenizer, markers: Collection[str] = ()) -> SpecialTokens:
        """`markers`: added tokens that are none of the special ones, but control the model too."""
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        tokens = {
            token.content: (number, token) for number, token in added.items() if token.content
        }
        return cls(
            ids={
                text: number
                for text, (number, token) in tokens.items()
                if token.special or text in markers
            },
            cuts=frozenset(text for text, (_, token) in tokens.items() if _is_cut(token)),
            heads=frozenset(
                text for text, (_, token) in tokens.items() if _is_cut(token) and not token.rstrip
            ),
            finder=TokenFinder(tokens),
            normalized=any(token.special and token.normalized for _, token in tokens.values()),
        )


def _is_cut(token: AddedToken) -> bool:
    """A token that touches no text before it: `lstrip` eats blanks there, `single_word` looks."""
    return bool(token.special and not (token.normalized or token.lstrip or token.single_word))


# An NFC or NFKC character stands for up to four of the text: its canonical decomposition's.
_COMPOSED = 4
_GROWING_NORMALIZERS = frozenset({"Prepend", "ByteLevel", "NFD", "NFKD", "Lowercase"})
_WORD_MODELS = frozenset({"WordLevel", "WordPiece"})
_WHOLE_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})


def most_characters(tokenizer: Tokenizer) -> int | None:
    """Characters of a text that one token may stand for; None where that has no bound.

    It has none where something shrinks a text before it becomes tokens: blanks are dropped, or a
    run of unknown characters becomes one token. Of a model of words an unknown one counts as no
    longer than those it knows, and of one of bytes each as known.
    """
    spec = msgspec.json.decode(tokenizer.to_str())
    steps = [
        steps_of(spec.get(kind), kind.replace("_", "")) for kind in ("normalizer", "pre_tokenizer")
    ]
    composed = 1
    for step in steps[0]:
        if step["type"] in ("NFC", "NFKC"):
            composed = _COMPOSED
        elif not (step["type"] in _GROWING_NORMALIZERS or _is_growing_replacement(step)):
            return None
    if not all(_keeps_all(step) for step in steps[1]):
        return None
    kinds = {step["type"] for step in (*steps[0], *steps[1])}
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    model = spec["model"]
    bytewise = "ByteLevel" in kinds or bool(model.get("byte_fallback"))
    eats_blanks = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    if eats_blanks or not (bytewise or model["type"] in _WORD_MODELS):
        return None
    return composed * max(map(len, vocabulary))


def _is_growing_replacement(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return step["type"] == "Replace" and bool(pattern) and len(step["content"]) >= len(pattern)


def _keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _WHOLE_PRE_TOKENIZERS
