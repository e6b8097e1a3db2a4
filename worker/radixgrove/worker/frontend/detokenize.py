"""Token ids to text, piece by piece, and stop strings.

A detokenizer sees generated ids only, never the prompt. What it has emitted never changes, it never
emits half a character, and its pieces concatenated are the one-shot decoding of all ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from radixgrove.protocol.token_bytes import TokenBytes, decoder_of

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so 4 byte tokens complete it; more that still read as
# broken are broken for good.
MAX_PENDING_TOKENS = 8
CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """State of one sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; possibly none yet."""
        ...

    def finish(self) -> str:
        """What is left at the end: a broken character reads as U+FFFD."""
        ...


class Vocabulary:
    """What all detokenizers of a model share: for byte-level vocabularies the bytes of each id."""

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        """`size`: ids below it are the model's, whether the tokenizer knows them or not."""
        self.tokenizer = tokenizer
        self.special_ids = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_bytes = TokenBytes(tokenizer, decoder_of(tokenizer.to_str()))
        self._table = self._token_bytes.table(size)

    def detokenizer(self, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer of one sequence.

        `prompt_ids` (its last few matter) tell vocabularies that mark words by a leading blank
        whether the first word continues a text; their text is never emitted.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._table is not None:
            return _ByteDetokenizer(self._table, skipped)
        return _WindowDetokenizer(self.tokenizer, skipped, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, as `logprobs` reports them."""
        return self._token_bytes.of(token_id)


class _ByteDetokenizer:
    """For byte-level vocabularies: a table look-up and an incremental UTF-8 decoder."""

    __slots__ = ("_bytes", "_decode", "_skipped")

    def __init__(self, table: list[bytes], skipped: frozenset[int]) -> None:
        self._bytes = table
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        table, skipped = self._bytes, self._skipped
        return self._decode(
            b"".join([table[number] for number in token_ids if number not in skipped])
        )

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """For any other vocabulary: decodes a window of the last few tokens.

    `context` was emitted last, `pending` was not. Text is what `context + pending` decodes to
    beyond `context` alone, so that blanks and joints come out as in the whole. The window stays
    short: the cost of a token does not grow with the sequence. The context begins where a character
    does, since it is what one emission showed.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._pending: list[int] = []
        self._context: list[int] = []
        self._emitted = ""  # what the context alone decodes to
        self._continue([number for number in prompt_ids if number not in skipped][-CONTEXT_TOKENS:])

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _continue(self, context: list[int]) -> None:
        text = self._text(context)
        # Broken bytes would spoil what follows them, and a prompt's are not ours to show.
        self._context, self._emitted = ([], "") if REPLACEMENT in text else (context, text)

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push(number) for number in token_ids if number not in self._skipped])

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._text(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._continue(self._pending)
        self._pending = []
        return new


class StopMatcher:
    """Finds the first stop string in a growing text, withholding what may become one.

    The result does not depend on how the text was cut into pieces: the stop string that is complete
    first wins, and of those that end together the one that began first.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. After a match (`matched`) nothing more comes."""
        if not self._stops:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None  # end, start
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: end if self._include else start]
        held = self._overlap(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def finish(self) -> str:
        """What was withheld, when the text ends without a match."""
        held, self._held = self._held, ""
        return held
