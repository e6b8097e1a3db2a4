"""What enforces JSON schemas, one interface over all: ours, and others where they are installed.

The others run in a child process each, which a schema may end or hold up: both are outcomes.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.worker.engine.tokenizer import tokenizer_of

WHITESPACE = 8
_MEMORY = 8 << 30  # bytes of address space that a child may have beside what it starts with


class RefusedError(Exception):
    """The schema is not compiled; the text says why."""


class Follower(Protocol):
    """One answer as it grows."""

    def allows(self, token: int) -> bool:
        """Whether the token may come next: a mask of all tokens is made, and read."""
        ...

    def consume(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...


class Compiled(Protocol):
    ignored: tuple[str, ...]  # keywords that are known not to be enforced

    def begin(self) -> Follower: ...


class Subject(Protocol):
    name: str  # with its version

    def compile(self, schema: Any) -> Compiled:
        """
        Raises:
            RefusedError: it cannot, or will not.
        """
        ...

    def tokenize(self, text: str) -> list[int]: ...


# ---- ours ------------------------------------------------------------------------------------


class _LlFollower:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allows(self, token: int) -> bool:
        mask = self._matcher.compute_bitmask()
        return bool(mask[token // 8] >> token % 8 & 1)

    def consume(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def may_end(self) -> bool:
        return self._matcher.is_accepting()


class _LlCompiled:
    def __init__(self, grammar: str, ignored: tuple[str, ...], tokenizer: LLTokenizer) -> None:
        self.ignored = ignored
        self._fresh = build_matcher(grammar, tokenizer)

    def begin(self) -> Follower:
        return _LlFollower(self._fresh.deep_copy())


class Ours:
    """llguidance, as workers use it."""

    def __init__(self, model_dir: Path, *, strict: bool) -> None:
        self.name = f"llguidance {importlib.metadata.version('llguidance')}"
        self._tokenizer = tokenizer_of(model_dir)
        self._strict = strict

    def compile(self, schema: Any) -> Compiled:
        try:
            text = json.dumps(schema, ensure_ascii=False).encode()
            asked = constraint.json_schema(text, "schema", strict=self._strict)
            compiled = compile_constraint(asked, self._tokenizer, WHITESPACE)
        except ConstraintError as error:
            raise RefusedError(error.reason) from None
        return _LlCompiled(compiled.grammar, compiled.ignored, self._tokenizer)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text)


# ---- others ----------------------------------------------------------------------------------


class _HasTokenizer:
    def __init__(self, model_dir: Path) -> None:
        directory = ModelDirectory.load(model_dir)
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.vocab_size = directory.config.vocab_size
        self.eos = directory.eos_ids[0]

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class XGrammar(_HasTokenizer):
    """Any white space between tokens of JSON, and properties beside those that are named."""

    def __init__(self, model_dir: Path) -> None:
        import xgrammar

        super().__init__(model_dir)
        self.name = f"xgrammar {importlib.metadata.version('xgrammar')}"
        texts = [self.tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self.vocab_size,
            stop_token_ids=[self.eos],
        )
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Compiled:
        try:
            text = json.dumps(schema, ensure_ascii=False)
            compiled = self._compiler.compile_json_schema(
                text, any_whitespace=True, strict_mode=False
            )
        except Exception as error:  # bare RuntimeErrors, with the reason
            raise RefusedError(str(error)) from None
        return _XCompiled(self._xgrammar, compiled, self)


class _XCompiled:
    ignored = ()

    def __init__(self, xgrammar: Any, compiled: Any, subject: XGrammar) -> None:
        self._xgrammar, self._compiled, self._subject = xgrammar, compiled, subject

    def begin(self) -> Follower:
        matcher = self._xgrammar.GrammarMatcher(self._compiled)
        mask = self._xgrammar.allocate_token_bitmask(1, self._subject.vocab_size)
        return _XFollower(matcher, mask, self._subject.eos)


class _XFollower:
    def __init__(self, matcher: Any, mask: Any, eos: int) -> None:
        self._matcher, self._mask, self._eos = matcher, mask, eos

    def allows(self, token: int) -> bool:
        self._matcher.fill_next_token_bitmask(self._mask)
        return bool(int(self._mask[0, token // 32]) >> token % 32 & 1)

    def consume(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def may_end(self) -> bool:
        return self.allows(self._eos)


class OutlinesCore(_HasTokenizer):
    """A regular expression of the schema, as an automaton over the vocabulary."""

    def __init__(self, model_dir: Path) -> None:
        import outlines_core

        super().__init__(model_dir)
        self.name = f"outlines-core {importlib.metadata.version('outlines-core')}"
        self._outlines = outlines_core
        texts: dict[bytes, list[int]] = {}
        byte_of = _bytes_of_characters()
        for token in range(self.vocab_size):
            text = self.tokenizer.id_to_token(token)
            if token != self.eos and text and all(each in byte_of for each in text):
                texts.setdefault(bytes(byte_of[each] for each in text), []).append(token)
        self._vocabulary = outlines_core.Vocabulary(self.eos, texts)

    def compile(self, schema: Any) -> Compiled:
        try:
            text = json.dumps(schema, ensure_ascii=False)
            regex = self._outlines.json_schema.build_regex_from_schema(text)
            index = self._outlines.Index(regex, self._vocabulary)
        except Exception as error:  # of several kinds, with the reason
            raise RefusedError(str(error)) from None
        return _OutlinesCompiled(self._outlines, index, self)


class _OutlinesCompiled:
    ignored = ()

    def __init__(self, outlines: Any, index: Any, subject: OutlinesCore) -> None:
        self._outlines, self._index, self._subject = outlines, index, subject

    def begin(self) -> Follower:
        return _OutlinesFollower(self._outlines.Guide(self._index), self._subject)


class _OutlinesFollower:
    def __init__(self, guide: Any, subject: OutlinesCore) -> None:
        self._guide, self._eos = guide, subject.eos
        self._mask = np.zeros(-(-subject.vocab_size // 32), dtype=np.uint32)

    def allows(self, token: int) -> bool:
        self._guide.write_mask_into(self._mask.ctypes.data, self._mask.size, 4)
        return bool(int(self._mask[token // 32]) >> token % 32 & 1)

    def consume(self, token: int) -> bool:
        self._guide.advance(token, False)
        return True

    def may_end(self) -> bool:
        return self.allows(self._eos)


def _bytes_of_characters() -> dict[str, int]:
    """Bytes by the characters that stand for them in vocabularies of byte pairs."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


OTHERS: dict[str, Callable[[Path], Subject]] = {
    "xgrammar": XGrammar,
    "outlines-core": OutlinesCore,
}


# ---- child processes -------------------------------------------------------------------------


class Child:
    """Runs a function of a subject in a process of its own, anew where a schema ended it."""

    def __init__(self, name: str, model_dir: Path, work: Callable[[Any, Subject], Any]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._arguments = (name, model_dir, work)
        self._process: Any = None
        self._pipe: Any = None
        self.name = ""

    def run(self, item: Any, seconds: float) -> Any:
        """
        Raises:
            TimeoutError: it took longer than so many seconds.
            EOFError: the process ended.
        """
        if self._process is None:
            self._start()
        self._pipe.send(item)
        try:
            if not self._pipe.poll(seconds):
                raise TimeoutError
            return self._pipe.recv()
        except (TimeoutError, EOFError):
            self.stop()
            raise

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve, args=(other, *self._arguments), daemon=True
        )
        self._process.start()
        other.close()
        self.name = self._pipe.recv()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(
    pipe: Connection, name: str, model_dir: Path, work: Callable[[Any, Subject], Any]
) -> None:
    subject = OTHERS[name](model_dir)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)
    pipe.send(subject.name)
    while True:
        pipe.send(work(pipe.recv(), subject))
