"""Which tokens a sequence may have next, as bit masks: its grammar's matcher, and plainer rules.

A sequence's rules belong to its request, not to its row: they follow the tokens that it has got,
whatever happens to the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from radixgrove.protocol.constraints.grammar import outgrown, refusal
from radixgrove.worker.messages import TokenRules
from radixgrove.worker.scheduler.matchers import Grammar, Lexer

_Entry = TypeVar("_Entry")

# To wake threads takes as long as some tokens.
_FEWEST_BESIDE = 4

# [rows, words] int32: bit t % 32 of word t // 32 says whether token t may come.
Masks = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class Phase(Enum):
    """What holds at a sequence's next position."""

    BEGIN = "begin"  # the output may begin with a block of reasoning
    REASONING = "reasoning"  # any token but those that would end the answer too early
    CLOSING = "closing"  # the next of the tokens with which the block of reasoning ends
    FREE = "free"  # any token, up to a trigger
    BOUND = "bound"  # what the grammar allows


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceRules:
    """The rules of one sequence."""

    rules: TokenRules
    grammar: Grammar | None
    matcher: LLMatcher | None = field(init=False, default=None)  # once the grammar has had a say
    lexer: Lexer | None = field(init=False, default=None)  # the matcher's
    base: Masks | None = None  # [words]: what may come whatever came before, but for the grammar
    # Banned sequences of several tokens, by their last but one.
    longer: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    restricts: bool = field(init=False)  # there are rules beside the grammar
    phase: Phase = field(init=False)
    thought: int = 0  # tokens within the block of reasoning
    closed: int = 0  # tokens of the end's tail

    def __post_init__(self) -> None:
        reasoning = self.rules.reasoning
        plain = self.rules.allowed is None and not self.rules.banned
        self.restricts = reasoning is not None or not plain
        self.phase = self._answering
        if reasoning is not None and (reasoning.open or reasoning.begin is not None):
            self.phase = Phase.REASONING if reasoning.open else Phase.BEGIN

    @property
    def _answering(self) -> Phase:
        """Where the answer itself begins."""
        return Phase.FREE if self.rules.triggers or self.grammar is None else Phase.BOUND

    @property
    def binds(self) -> bool:
        """Whether the grammar has a say in the next token."""
        first = self._answering if self.phase is Phase.BEGIN else self.phase
        return first is Phase.BOUND

    def consume(self, tokens: Sequence[int]) -> None:
        """The sequence got these tokens."""
        if self.phase is Phase.BOUND and not self.rules.again:
            self._match(tokens)
            return
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        reasoning, triggers = self.rules.reasoning, self.rules.triggers
        if self.phase in (Phase.BEGIN, Phase.FREE):
            if reasoning is not None and token == reasoning.begin:
                self.phase, self.thought = Phase.REASONING, 0
                return
            self.phase = self._answering
        if self.phase is Phase.REASONING:
            assert reasoning is not None
            self.thought += 1
            if token == reasoning.end:
                self.phase = Phase.CLOSING if reasoning.tail else self._answering
            elif reasoning.calls and token in triggers:
                self.phase = Phase.BOUND
        elif self.phase is Phase.CLOSING:
            assert reasoning is not None
            self.closed += 1
            if self.closed == len(reasoning.tail):
                self.phase = self._answering
        elif self.phase is Phase.FREE:
            if token in triggers:
                self.phase = Phase.BOUND
        else:
            self._match((token,))

    def begin(self) -> LLMatcher | None:
        """Its matcher, from now on; None: it has no grammar, or that has no lexer at present."""
        if self.matcher is None and self.grammar is not None and self.grammar.ready:
            self.lexer, self.matcher = self.grammar.begin(self)
        return self.matcher

    def _match(self, tokens: Sequence[int]) -> None:
        matcher = self.begin()
        if matcher is None:
            return
        matcher.consume_tokens(list(tokens))
        if self.rules.again and matcher.is_stopped() and self.error is None:
            matcher.reset()
            self.phase = Phase.FREE

    @property
    def follows_alone(self) -> bool:
        """Whether all that is to be done for a new token is that the matcher consumes it."""
        return self.phase is Phase.BOUND and not self.rules.again and self.matcher is not None

    @property
    def lexer_number(self) -> int:
        return -1 if self.lexer is None else self.lexer.number

    @property
    def stopped(self) -> bool:
        """Whether its grammar is at its end, or its matcher has failed."""
        return self.matcher is not None and self.matcher.is_stopped()

    @property
    def ended(self) -> bool:
        """Whether its grammar is at its end: nothing may follow."""
        return (
            self.phase is Phase.BOUND
            and self.matcher is not None
            and self.matcher.is_stopped()
            and self.error is None
        )

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model would have: the grammar leaves no choice.
        Rules that ban tokens might, so that there are none beside those."""
        if self.phase is not Phase.BOUND or self.rules.allowed is not None or self.rules.banned:
            return []
        matcher = self.begin()
        return [] if matcher is None or matcher.is_error() else matcher.compute_ff_tokens()

    def look_for_failure(self) -> None:
        """After the matcher was used: where its lexer has met too much, that has failed."""
        matcher, lexer = self.matcher, self.lexer
        if matcher is None or lexer is None or self.grammar is None or not matcher.is_error():
            return
        if outgrown(matcher.get_error()):
            self.grammar.drop(lexer)

    @property
    def outgrown(self) -> bool:
        """Whether its lexer has failed, or there is none to begin with."""
        return self.lacks_lexer if self.lexer is None else self.lexer.failed

    @property
    def lacks_lexer(self) -> bool:
        """Whether it is to begin, and its grammar's next lexer is still being built."""
        if self.lexer is not None or self.grammar is None or not self.binds:
            return False
        return not self.grammar.ready

    @property
    def error(self) -> str | None:
        """Why the matcher failed, in words for a client; it stays so."""
        if self.matcher is None or not self.matcher.is_error():
            return None
        return refusal(self.matcher.get_error()).reason

    def restrict(self, mask: Masks, output: Sequence[int]) -> bool:
        """Take out of a mask [words] what rules other than the grammar forbid after `output`.

        Returns:
            Whether any token is left.
        """
        reasoning = self.rules.reasoning
        if self.phase is Phase.BEGIN and reasoning is not None and reasoning.begin is not None:
            _allow(mask, reasoning.begin)
        if self.phase is Phase.CLOSING and reasoning is not None:
            mask[:] = 0
            _allow(mask, reasoning.tail[self.closed])
            return True
        if self.phase is Phase.REASONING and reasoning is not None:
            if reasoning.budget is not None and self.thought >= reasoning.budget:
                mask[:] = 0
                _allow(mask, reasoning.end)
                return True
            for token in reasoning.banned:
                _forbid(mask, token)
        if self.rules.allowed is None and not self.rules.banned:
            return True
        if self.base is None or len(self.base) != len(mask):
            self.base = self._prepare(len(mask))
        mask &= self.base
        for *before, last in self.longer.get(output[-1], ()) if output else ():
            if _ends_with(output, before):
                _forbid(mask, last)
        return bool(mask.any())

    def _prepare(self, words: int) -> Masks:
        """`base`, and `longer` beside it."""
        allowed = self.rules.allowed
        base = np.full(words, -1, np.int32) if allowed is None else _bits(allowed, words)
        self.longer.clear()
        for sequence in self.rules.banned:
            if len(sequence) == 1:
                _forbid(base, sequence[0])
            else:
                self.longer.setdefault(sequence[-2], []).append(sequence)
        return base


def consume_all(
    executor: LLExecutor, entries: Sequence[tuple[SequenceRules, Sequence[int]]]
) -> None:
    """Sequences got these tokens; matchers that get one each consume it beside each other."""
    together: list[tuple[int, tuple[LLMatcher, int]]] = []
    for rules, tokens in entries:
        if len(tokens) == 1 and rules.follows_alone and rules.matcher is not None:
            together.append((rules.lexer_number, (rules.matcher, tokens[0])))
        else:
            rules.consume(tokens)
    if len(together) >= _FEWEST_BESIDE:
        executor.consume_token_par(_by_lexer(together))
    else:
        for _, (matcher, token) in together:
            matcher.consume_token(token)


def fill_masks(
    executor: LLExecutor, entries: Sequence[tuple[SequenceRules, Sequence[int]]], masks: Masks
) -> None:
    """What each sequence's grammar allows at its next position, and at those behind it.

    Args:
        entries: each with the tokens that are proposed to follow the sequence, and one row of
            `masks` more than those, in order. Rows are full behind a proposal that cannot come, and
            where the grammar does not hold yet: propose nothing there that could begin it.
        masks: all of its rows are written.
    """
    first = 0
    plain: list[tuple[int, tuple[LLMatcher, int]]] = []
    ahead: list[tuple[int, tuple[LLMatcher, int, list[int]]]] = []
    for rules, proposed in entries:
        rows = 1 + len(proposed)
        matcher = rules.begin() if rules.binds else None
        if matcher is None or matcher.is_stopped():
            masks[first : first + rows] = -1
        elif proposed:
            masks[first : first + rows] = -1
            ahead.append((rules.lexer_number, (matcher, first, list(proposed))))
        else:
            plain.append((rules.lexer_number, (matcher, first)))
        first += rows
    where, row_bytes, count = masks.ctypes.data, masks.strides[0], len(masks)
    if plain:
        executor.unsafe_compute_mask_ptr(_by_lexer(plain), where, row_bytes, count)
    if ahead:
        executor.unsafe_compute_mask_ptr_with_draft_token(_by_lexer(ahead), where, row_bytes, count)


def _by_lexer(entries: list[tuple[int, _Entry]]) -> list[_Entry]:
    """Sorted by lexer: a thread takes neighbours, so threads rarely wait for the same lexer."""
    entries.sort(key=itemgetter(0))
    return [entry for _, entry in entries]


def _bits(tokens: Sequence[int], words: int) -> Masks:
    """A mask [words] of these tokens alone."""
    flags = np.zeros(32 * words, dtype=np.uint8)
    ids = np.array(tokens, dtype=np.int64)
    flags[ids[ids < len(flags)]] = 1
    return np.packbits(flags, bitorder="little").view("<i4")


def _forbid(mask: Masks, token: int) -> None:
    """Take a token out of a mask [words]."""
    if token < 32 * len(mask):
        mask[token // 32] &= ~_bit(token)


def _allow(mask: Masks, token: int) -> None:
    """Put a token into a mask [words]."""
    if token < 32 * len(mask):
        mask[token // 32] |= _bit(token)


def _bit(token: int) -> np.int32:
    bit = 1 << (token % 32)
    return np.int32(bit - (1 << 32) if bit >> 31 else bit)


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return list(tokens[-len(end) :]) == list(end)
