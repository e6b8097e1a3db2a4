"""Grammars on their way from text to matchers: built in threads, kept for the next sequences.

While its grammar is being built a request waits without a row (`AWAITING_GRAMMAR`), and holds up no
other. A matcher that was built stays, at its beginning, and each sequence gets a copy of one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
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

LoadTokenizer = Callable[[], LLTokenizer]

_BUILDERS = 2  # threads, for grammars that requests wait for; further lexers have one
_MOST_KEPT = 64  # matchers at their beginning, of some megabytes where grammars are large
_MOST_THREADS = 8


@dataclass(slots=True)
class _Build:
    """A matcher that is being built, and who waits for it."""

    work: Callable[[], LLMatcher]
    begun: threading.Event
    future: Future[LLMatcher]
    waiting: list[Request] = field(default_factory=list)
    shared: bool = True  # with requests that ask for it later
    since: float | None = None  # when it was first seen to have begun


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
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._live: WeakSet[SequenceRules] = WeakSet()

    @property
    def live(self) -> int:
        """Rules that exist, of requests that have not ended."""
        return len(self._live)

    @property
    def building(self) -> bool:
        return bool(self._builds)

    @property
    def awaited(self) -> int:
        """Requests that wait for a grammar."""
        waiting = (request for build in self._builds.values() for request in build.waiting)
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
        """A request that was preempted waits for a matcher of its own, which then follows what it
        has said so far: the lexer of the last one met too much, maybe in others' answers."""
        rules = request.submit.rules
        assert rules is not None
        assert rules.grammar is not None
        build = self._begin(rules.grammar)
        build.shared = False
        build.waiting.append(request)
        self._builds[b"renewed " + request.request_id.encode()] = build
        request.rules = None  # frees the old matcher
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
            if build.begun.is_set() and build.since is None:
                build.since = now
            if build.since is not None and now - build.since > self._timeout:
                error = f"The grammar took more than {self._timeout:g} s to compile."
                settled += [Settled(request, error, late=True) for request in waiting]
                waiting = []
            build.waiting = waiting
        return settled

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

    def _begin(self, grammar: str) -> _Build:
        if self._tokenizer is None:
            self._tokenizer = self._builders.submit(self._load)
        tokenizer = self._tokenizer
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
            matcher = build.future.result()
        except ConstraintError as error:
            return [Settled(request, f"{error.reason}.") for request in waiting]
        if build.shared:
            grammar = Grammar(matcher, lambda: self._more.submit(build.work), self._threads)
            self._kept[key] = grammar
        else:
            grammar = Grammar(matcher)
        for request in waiting:
            self._attach(request, grammar)
            request.become(RequestState.PREEMPTED if request.ran else RequestState.WAITING)
        self._trim()
        return [Settled(request) for request in waiting]

    def _attach(self, request: Request, grammar: Grammar | None) -> None:
        assert request.submit.rules is not None
        request.rules = SequenceRules(request.submit.rules, grammar)
        self._live.add(request.rules)
        if grammar is not None:
            grammar.expect(request.rules)
            request.rules.consume(request.output)

    def forget(self, rules: SequenceRules) -> None:
        """A matcher failed. The fault may be its lexer's, such as too many states, and would then
        be every later copy's: the next request has the grammar built anew."""
        for key, grammar in self._kept.items():
            if grammar is rules.grammar:
                del self._kept[key]
                return

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
