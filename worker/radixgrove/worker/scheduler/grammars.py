"""Grammars on their way from text to matchers: built in threads, kept for the next sequences.

While its grammar is being built a request waits without a row (`AWAITING_GRAMMAR`), and holds up no
other. A matcher that was built stays, at its beginning, and each sequence gets a copy of one.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TypeVar
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import build_matcher, compiler_threads
from radixgrove.service.machine import cores
from radixgrove.worker.scheduler.matchers import Grammar
from radixgrove.worker.scheduler.request import Request, RequestState
from radixgrove.worker.scheduler.rules import (
    Masks,
    SequenceRules,
    consume_all,
    fill_masks,
    mask_words,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

LoadTokenizer = Callable[[], LLTokenizer]

_BUILDERS = 2  # threads, for grammars that requests wait for; further lexers have one
_MOST_KEPT = 64  # matchers at their beginning, of some megabytes where grammars are large
_MOST_THREADS = 8
_MOST_LONG = 16  # answers with a matcher of the larger bounds, some 50 MB each where they need it
_FOLLOWED_AT_ONCE = 256  # tokens: about a millisecond


@dataclass(slots=True)
class _Build:
    """A matcher that is being built, and who waits for it."""

    work: Callable[[], LLMatcher]
    begun: threading.Event
    future: Future[LLMatcher]
    waiting: list[Request] = field(default_factory=list)
    since: float | None = None  # when it was first seen to have begun


@dataclass(slots=True)
class _Renewal:
    """A matcher that is built anew for one request, and follows its output."""

    request: Request
    begun: threading.Event
    future: Future[SequenceRules]
    since: float | None = None


@dataclass(slots=True)
class _Lexerless:
    """A request that waits for its grammar's next lexer."""

    request: Request
    since: float | None = None


def broken(why: str) -> str:
    """The message of an answer that ends since its rules cannot be held any longer."""
    return f"The answer could not be held to what it must be: {why}."


def _built(future: Future[T]) -> T:
    """What a thread has built.

    Raises:
        ConstraintError: it could not, for whatever reason: that ends no other request.
    """
    try:
        return future.result()
    except ConstraintError:
        raise
    except Exception as error:
        logger.exception("a grammar could not be built")
        raise ConstraintError("the grammar could not be built") from error


@dataclass(frozen=True, slots=True)
class Settled:
    """A request waits no longer: its rules are there, or there is a reason why not."""

    request: Request
    error: str | None = None
    late: bool = False  # the grammar took too long


class Grammars:
    """Owns the builds, the kept matchers and the rules of every live request."""

    def __init__(
        self, load: LoadTokenizer, vocab_size: int, timeout: float, threads: int | None = None
    ) -> None:
        """
        Args:
            load: the model's tokenizer; called in a thread, once a grammar needs it. May raise
                ConstraintError.
            vocab_size: the model's.
            timeout: seconds to build a grammar.
            threads: to compute masks with.
        """
        self._load = load
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._threads = threads or min(_MOST_THREADS, cores())
        self._tokenizer: Future[LLTokenizer] | None = None
        self._builds: dict[bytes, _Build] = {}
        self._renewals: list[_Renewal] = []
        self._lexerless: list[_Lexerless] = []
        self._renewed: WeakSet[SequenceRules] = WeakSet()  # with matchers of their own
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._live: WeakSet[SequenceRules] = WeakSet()

    @property
    def live(self) -> int:
        """Rules that exist, of requests that have not ended."""
        return len(self._live)

    @property
    def building(self) -> bool:
        return bool(self._builds or self._renewals or self._lexerless)

    @property
    def awaited(self) -> int:
        """Requests that wait for a grammar."""
        waiting = [request for build in self._builds.values() for request in build.waiting]
        waiting += [renewal.request for renewal in self._renewals]
        waiting += [each.request for each in self._lexerless]
        return sum(request.state is RequestState.AWAITING_GRAMMAR for request in waiting)

    def enter(self, request: Request) -> None:
        """A request waits in the queue: give it its rules, or let it wait for those too."""
        rules = request.submit.rules
        if rules is None:
            return
        if rules.grammar is None:
            self._attach(request, None)
            return
        key = sha256(rules.grammar.encode()).digest()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._attach(request, kept)
            self._trim()
            return
        build = self._builds.get(key)
        if build is None:
            build = self._builds[key] = self._begin(rules.grammar)
        build.waiting.append(request)
        request.become(RequestState.AWAITING_GRAMMAR)

    def renew(self, request: Request) -> None:
        """A request that was preempted waits for a matcher of its own, which follows what it has
        said so far."""
        rules, output = request.submit.rules, list(request.output)
        assert rules is not None
        assert rules.grammar is not None
        text, tokenizer = rules.grammar, self._loaded()
        long = len(self._renewals) + len(self._renewed) < _MOST_LONG
        begun = threading.Event()

        def build() -> SequenceRules:
            begun.set()
            own = Grammar(build_matcher(text, tokenizer.result(), long=long))
            followed = SequenceRules(rules, own)
            # By parts: llguidance holds Python's lock, for which the engine waits.
            for first in range(0, len(output), _FOLLOWED_AT_ONCE):
                followed.consume(output[first : first + _FOLLOWED_AT_ONCE])
            return followed

        request.rules = None  # frees the old matcher
        self._renewals.append(_Renewal(request, begun, self._builders.submit(build)))
        request.become(RequestState.AWAITING_GRAMMAR)

    def await_lexer(self, request: Request) -> None:
        """A request that was preempted waits for its grammar's next lexer: the last one failed."""
        self._lexerless.append(_Lexerless(request))
        request.become(RequestState.AWAITING_GRAMMAR)

    def settle(self, now: float) -> list[Settled]:
        """What has become of those that wait; the caller refuses those with an error."""
        settled: list[Settled] = []
        for key, build in list(self._builds.items()):
            waiting = [r for r in build.waiting if r.state is RequestState.AWAITING_GRAMMAR]
            if build.future.done():
                del self._builds[key]
                settled += self._end(key, build, waiting)
                continue
            if self._is_late(build, now):
                error = f"The grammar took more than {self._timeout:g} s to compile."
                settled += [Settled(request, error, late=True) for request in waiting]
                waiting = []
            build.waiting = waiting
        return settled + self._settle_renewals(now) + self._settle_lexerless(now)

    def _settle_renewals(self, now: float) -> list[Settled]:
        settled: list[Settled] = []
        renewals, self._renewals = self._renewals, []
        for renewal in renewals:
            request = renewal.request
            waits = request.state is RequestState.AWAITING_GRAMMAR
            if waits and renewal.future.done():
                settled.append(self._end_renewal(request, renewal.future))
            elif waits and not self._is_late(renewal, now):
                self._renewals.append(renewal)
            else:
                renewal.future.cancel()
                if waits:
                    settled.append(Settled(request, self._late_again))
        return settled

    def _settle_lexerless(self, now: float) -> list[Settled]:
        settled: list[Settled] = []
        lexerless, self._lexerless = self._lexerless, []
        for each in lexerless:
            request = each.request
            if request.state is not RequestState.AWAITING_GRAMMAR:
                continue
            each.since = now if each.since is None else each.since
            assert request.rules is not None
            if not request.rules.lacks_lexer:
                request.become(RequestState.PREEMPTED)
                settled.append(Settled(request))
            elif now - each.since > self._timeout:
                settled.append(Settled(request, self._late_again))
            else:
                self._lexerless.append(each)
        return settled

    @property
    def _late_again(self) -> str:
        return broken(f"its grammar took more than {self._timeout:g} s to build anew")

    def _is_late(self, build: _Build | _Renewal, now: float) -> bool:
        if build.begun.is_set() and build.since is None:
            build.since = now
        return build.since is not None and now - build.since > self._timeout

    def consume(self, entries: list[tuple[SequenceRules, list[int]]]) -> None:
        """See `consume_all`."""
        consume_all(self._executor, entries)

    def fill(self, entries: list[tuple[SequenceRules, list[int]]], masks: Masks) -> None:
        """See `fill_masks`."""
        fill_masks(self._executor, entries, masks)

    @property
    def words(self) -> int:
        """Words of a mask: it has a bit for each id of the tokenizer or the model."""
        tokenizer = self._tokenizer
        if tokenizer is not None and tokenizer.done() and tokenizer.exception() is None:
            return mask_words(tokenizer.result().vocab_size)
        return mask_words(self._vocab_size)

    def _loaded(self) -> Future[LLTokenizer]:
        """Loaded once, and again if that failed: frontends let no grammar through where it must."""
        known = self._tokenizer
        if known is None or (known.done() and known.exception() is not None):
            known = self._tokenizer = self._builders.submit(self._load)
        return known

    def _begin(self, grammar: str) -> _Build:
        tokenizer = self._loaded()
        begun = threading.Event()

        def build() -> LLMatcher:
            known = tokenizer.result()
            begun.set()
            matcher = build_matcher(grammar, known)
            matcher.compute_bitmask()  # what it learns here its copies know
            return matcher

        return _Build(build, begun, self._builders.submit(build))

    def _end(self, key: bytes, build: _Build, waiting: list[Request]) -> list[Settled]:
        try:
            matcher = _built(build.future)
        except ConstraintError as error:
            return [Settled(request, f"{error.reason}.") for request in waiting]
        grammar = Grammar(matcher, lambda: self._more.submit(build.work), self._threads)
        self._kept[key] = grammar
        for request in waiting:
            self._attach(request, grammar)
            request.become(RequestState.WAITING)
        self._trim()
        return [Settled(request) for request in waiting]

    def _end_renewal(self, request: Request, future: Future[SequenceRules]) -> Settled:
        try:
            rules = _built(future)
        except ConstraintError as error:
            return Settled(request, broken(error.reason))
        if rules.error is not None:
            return Settled(request, broken(rules.error))
        request.rules = rules
        self._live.add(rules)
        self._renewed.add(rules)
        request.become(RequestState.PREEMPTED)
        return Settled(request)

    def _attach(self, request: Request, grammar: Grammar | None) -> None:
        assert request.submit.rules is not None
        request.rules = SequenceRules(request.submit.rules, grammar)
        self._live.add(request.rules)
        if grammar is not None:
            grammar.expect(request.rules)

    def _trim(self) -> None:
        """Forget the grammars that were not asked for the longest, but for the last one."""
        kept = sum(grammar.lexers for grammar in self._kept.values())
        while kept > _MOST_KEPT and len(self._kept) > 1:
            kept -= self._kept.popitem(last=False)[1].lexers

    @cached_property
    def _builders(self) -> ThreadPoolExecutor:
        return compiler_threads(_BUILDERS, "grammars")

    @cached_property
    def _more(self) -> ThreadPoolExecutor:
        return compiler_threads(1, "lexers")

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._threads)
