"""A grammar that was built, and the matchers that its sequences get.

Copies of a matcher share its lexer, which learns what it meets and lies behind a lock: they wait
for each other there, however many threads follow them. So a grammar of many sequences has several
lexers, each with a matcher of its own that is built anew, in a thread, while sequences begin with
the lexers that are there.

A lexer keeps what it has met. Where that is too much, one of its matchers fails, and the others
fail later or leave out tokens: none is to be followed any further, and no sequence begins with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from weakref import WeakSet

from llguidance import LLMatcher

_SEQUENCES_A_LEXER = 8

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Lexer:
    origin: LLMatcher  # at its beginning
    users: WeakSet[object] = field(default_factory=WeakSet)  # sequences with a copy
    number: int = field(default_factory=lambda: next(_numbers))  # unique in the process
    failed: bool = False


class Grammar:
    """Owns a grammar's lexers; knows the sequences that have it, or wait to begin with it."""

    def __init__(
        self,
        matcher: LLMatcher,
        build: Callable[[], Future[LLMatcher]] | None = None,
        most_lexers: int = 1,
    ) -> None:
        """
        Args:
            matcher: at its beginning.
            build: begins to build another such matcher. None: there is one lexer.
            most_lexers: as many as there are threads that follow matchers.
        """
        self._lexers = [Lexer(matcher)]
        self._build = build
        self._most_lexers = most_lexers
        self._coming: list[Future[LLMatcher]] = []
        self._sequences: WeakSet[object] = WeakSet()

    @property
    def lexers(self) -> int:
        """Those that are there, and those that are being built."""
        return len(self._lexers) + len(self._coming)

    def expect(self, sequence: object) -> None:
        """A sequence has this grammar, and will begin with it some time."""
        self._sequences.add(sequence)
        wanted = min(self._most_lexers, -(-len(self._sequences) // _SEQUENCES_A_LEXER))
        while self._build is not None and self.lexers < wanted:
            self._coming.append(self._build())

    @property
    def ready(self) -> bool:
        """Whether a sequence can begin: another lexer is awaited where the last one has failed."""
        if self._coming:
            self._take_in()
        self._build_the_first()
        return bool(self._lexers)

    def begin(self, sequence: object) -> tuple[Lexer, LLMatcher]:
        """A matcher of the lexer that the fewest others use. To be called when `ready`."""
        lexer = min(self._lexers, key=lambda lexer: len(lexer.users))
        lexer.users.add(sequence)
        return lexer, lexer.origin.deep_copy()

    def drop(self, lexer: Lexer) -> None:
        """It has failed."""
        lexer.failed = True
        self._lexers = [other for other in self._lexers if other is not lexer]
        self._build_the_first()

    def _build_the_first(self) -> None:
        """Of those that come after the last one failed, or was not built."""
        if not self.lexers and self._build is not None:
            self._coming.append(self._build())

    def _take_in(self) -> None:
        """Lexers that have been built; without one that failed the others do its work."""
        done = [future for future in self._coming if future.done()]
        self._coming = [future for future in self._coming if future not in done]
        self._lexers += [Lexer(future.result()) for future in done if not future.exception()]
