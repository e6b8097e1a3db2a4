"""What a model writes, taken apart by its format: reasoning, content and tool calls.

The same events come of a text however it is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from radixgrove.protocol.formats.shapes import Calls, Channels, Format
from radixgrove.worker.frontend.call_reader import (
    NAME,
    CallParts,
    CallReader,
    Outcome,
    Properties,
)
from radixgrove.worker.frontend.events import CallArguments, CallBegins, CallEnds, Reasoning
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.scanner import Ended, Malformed, Pieces, Scanner, joined

_BETWEEN = " \t\r\n,;[]"  # what may stand between calls, or behind them


@dataclass(slots=True)
class Content:
    """A piece of content, which is what the characters `begin` to `end` of the output are."""

    text: str
    begin: int
    end: int


Part = Reasoning | Content | CallBegins | CallArguments | CallEnds
Parts = Generator[Part | None, None, None]


class OutputParser:
    """One choice's output. Feed it text with markers as `Markers` has them."""

    def __init__(
        self,
        form: Format,
        markers: Markers,
        *,
        offered: Properties | None,
        new_id: Callable[[str, int], str],
        in_reasoning: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            offered: tools that may be called; None: calls are text.
            new_id: the id of the call of this name and number.
            in_reasoning: the prompt ends within a block of reasoning.
        """
        self._markers = markers
        self._reasoning = form.reasoning
        self._channels = form.calls if isinstance(form.calls, Channels) else None
        self._calls = form.calls if isinstance(form.calls, Calls) and offered is not None else None
        self._calls_tools = offered is not None
        frames = form.calls.frames if isinstance(form.calls, Calls) else ()
        self._frames = [markers.trimmed(text) for text in frames]
        self._hide = skip_special_tokens
        self._in_reasoning = in_reasoning
        self._scanner = Scanner()
        self._reader = CallReader(self._scanner, markers, offered or {}, new_id)
        self._said = False  # any content but white space
        self._trimmer = _Trimmer()
        self._parts = self._run()

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to a block of reasoning."""
        return self._in_reasoning

    @property
    def calls(self) -> int:
        """How many have begun."""
        return self._reader.begun

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the calls that have ended, or have been given up."""
        return self._reader.outcomes

    def feed(self, text: str) -> list[Part]:
        self._scanner.feed(text)
        return self._ready()

    def finish(self) -> list[Part]:
        """What is left at the output's end."""
        self._scanner.closed = True
        return self._ready()

    def _ready(self) -> list[Part]:
        found: list[Part] = []
        for part in self._parts:
            if part is None:
                break
            if found and isinstance(part, Content) and isinstance(found[-1], Content):
                found[-1].text += part.text
                found[-1].end = part.end
            else:
                found.append(part)
        return found

    # ---- the output as a whole ---------------------------------------------------------------

    def _run(self) -> Parts:
        try:
            if self._channels is not None:
                yield from self._messages(self._channels)
            if self._in_reasoning:
                yield from self._think()
            while True:
                if self._calls is not None and self._calls.bare and not (self._said or self.calls):
                    yield from self._bare(self._calls)
                found = yield from self._content()
                if found == "":
                    break
                if found in self._frames:
                    continue
                if self._reasoning is not None and found == self._markers.trimmed(
                    self._reasoning.begin
                ):
                    yield from self._think()
                elif self._calls is not None:
                    yield from self._section(self._calls, found)
        except Ended:
            pass
        blank = self._trimmer.take()
        if blank and not self.calls:
            end = self._scanner.offset
            yield Content(blank, end - len(blank), end)

    def _content(self) -> Generator[Part | None, None, str]:
        """Content up to what begins reasoning or calls, which is returned; empty: the end."""
        scanner = self._scanner
        triggers = list(self._frames)
        if self._reasoning is not None:
            triggers.append(self._markers.trimmed(self._reasoning.begin))
        if self._calls is not None and self._calls.trigger:
            triggers.append(self._markers.trimmed(self._calls.trigger))
        finder = re.compile("|".join(map(re.escape, triggers)) or r"(?!)")
        while True:
            found = finder.search(scanner.text, scanner.pos)
            if found is not None:
                yield from self._say(found.start())
                scanner.pos = found.end()
                return found[0]
            # Part of a frame at the output's end is no text.
            held = _overlap(scanner.text, self._frames if scanner.closed else triggers)
            yield from self._say(len(scanner.text) - held)
            if scanner.closed:
                return ""
            yield None

    def _say(self, end: int) -> Parts:
        """What is read up to `end` is content; white space at its end may turn out not to be."""
        scanner = self._scanner
        if end <= scanner.pos:
            return
        begin = scanner.offset
        text = scanner.text[scanner.pos : end]
        scanner.pos = end
        yield from self._content_of(text, begin, raw=False)

    def _content_of(self, text: str, begin: int, *, raw: bool) -> Parts:
        kept = self._trimmer.push(text)
        if kept:
            self._said = True
            end = begin + len(text) - self._trimmer.held
            shown = self._markers.outer(kept, hide_special=self._hide and not raw)
            yield Content(shown, end - len(kept), end)

    def _think(self) -> Parts:
        """Reasoning up to its end, white space around it left out."""
        assert self._reasoning is not None
        self._in_reasoning = True
        trimmer = _Trimmer(fresh=True)
        behind = self._frames[:1]
        if self._calls is not None and self._reasoning.ends_at_calls:
            behind.append(self._markers.trimmed(self._calls.trigger))
        marker = next((t[0] for t in behind if t[:1] in self._markers.chars.values()), "")
        for piece in self._to_the_end(self._markers.trimmed(self._reasoning.end), marker):
            if piece is None:
                yield None
            elif text := trimmer.push(piece):
                yield Reasoning(self._markers.outer(text))
        self._in_reasoning = False
        self._trimmer = _Trimmer(fresh=True)

    def _messages(self, channels: Channels) -> Parts:
        """An output of messages, up to its end."""
        scanner = self._scanner
        recipient = re.compile(re.escape(channels.recipient.strip()).replace(r"\{name\}", NAME))
        message, end = self._markers.trimmed(channels.message), self._markers.trimmed(channels.end)
        thoughts = self._markers.trimmed(channels.channel) + channels.thoughts
        while True:
            scanner.keep()
            try:
                header = yield from joined(scanner.until(message))
            except Ended:
                scanner.pos = len(scanner.text)
                text = scanner.kept()
                if self._markers.clean(text) == text:  # no header, not even a part of one
                    yield from self._content_of(text, scanner.offset - len(text), raw=True)
                raise
            scanner.forget()
            called = recipient.search(header)
            if called is not None and self._calls_tools:
                yield from self._message_call(called["name"], channels)
            elif thoughts in header:
                self._in_reasoning = True
                for piece in self._to_the_end(end):
                    yield None if piece is None else Reasoning(self._markers.outer(piece))
                self._in_reasoning = False
            else:
                begin = scanner.offset
                for piece in self._to_the_end(end):
                    if piece is None:
                        yield None
                    else:
                        yield from self._content_of(piece, begin, raw=False)
                        begin = scanner.offset

    def _to_the_end(self, end: str, marker: str = "") -> Pieces:
        """As `Scanner.until`; the last piece may end where the output does."""
        try:
            yield from self._scanner.until(end, marker)
        except Ended:
            rest = self._scanner.text[self._scanner.pos :]
            self._scanner.pos = len(self._scanner.text)
            if rest:
                yield rest
            raise

    def _message_call(self, name: str, channels: Channels) -> Parts:
        end, start = self._markers.trimmed(channels.end), self._markers.trimmed(channels.start)
        try:
            yield from self._of_calls(self._reader.message(name))
        except Malformed:
            yield self._reader.break_off()
        except Ended:
            self.outcomes.append(Outcome.CUT)
            raise
        yield from (None for piece in self._scanner.until(end, start) if piece is None)

    # ---- calls -------------------------------------------------------------------------------

    def _bare(self, calls: Calls) -> Parts:
        """An answer that may be nothing but calls."""
        scanner = self._scanner
        scanner.keep()
        try:
            yield from scanner.blanks()
        except Ended:
            yield from self._give_up(rest=True)
            raise
        if (yield from scanner.at(calls.bare)):
            yield from self._call(calls, known_only=True)
        else:
            yield from self._give_up()

    def _section(self, calls: Calls, trigger: str) -> Parts:
        """All that follows what begins calls, up to where content goes on."""
        scanner = self._scanner
        begin, section_end = (
            self._markers.trimmed(calls.call[0]),
            self._markers.trimmed(calls.section[1]),
        )
        opened = not calls.section[0]  # what was found began a call itself
        scanner.keep(trigger)
        while True:
            if not opened:
                try:
                    yield from scanner.blanks()
                except Ended:
                    yield from self._give_up(rest=True)
                    raise
                if section_end and (yield from scanner.skip(section_end)):
                    scanner.forget()
                    return
                if not (yield from scanner.skip(begin)):
                    yield from self._give_up()
                    return
            if not (yield from self._call(calls)) or not calls.section[0]:
                return
            opened = False
            scanner.keep()

    def _call(
        self, calls: Calls, *, known_only: bool = False
    ) -> Generator[Part | None, None, bool]:
        """One call, or a list of them, and what ends it; whether more may follow."""
        try:
            yield from self._of_calls(self._reader.read(calls, known_only=known_only))
        except Malformed:
            if not self._reader.open:
                self.outcomes.append(Outcome.TEXT)
                yield from self._give_up()
                return False
            yield self._reader.break_off()
            yield from self._pass_by(calls)
        except Ended:
            if self._reader.open:
                self.outcomes.append(Outcome.CUT)
            else:
                yield from self._give_up(rest=True)
            raise
        if self._scanner.keeping:
            yield from self._give_up()
        return True

    def _of_calls(self, parts: CallParts) -> Parts:
        """White space before a call is left out."""
        for part in parts:
            if isinstance(part, CallBegins):
                self._trimmer.take()
            yield part

    def _pass_by(self, calls: Calls) -> Parts:
        """What is left of a malformed call, if its end can be known."""
        end = self._markers.trimmed(calls.call[1] or calls.section[1])
        if end:
            yield from (None for piece in self._scanner.until(end) if piece is None)

    def _give_up(self, *, rest: bool = False) -> Parts:
        """What was read since a call began is content, with `rest` also what is not read yet."""
        scanner = self._scanner
        if rest:
            scanner.pos = len(scanner.text)
        text = scanner.kept()
        if self.calls and not text.strip(_BETWEEN):
            return  # behind calls that were whole
        if rest and text.strip() in self._markers.chars.values():
            return  # a marker, and nothing more came
        yield from self._content_of(text, scanner.offset - len(text), raw=True)


class _Trimmer:
    """Holds back white space, which turns out to be text only if more text follows."""

    def __init__(self, *, fresh: bool = False) -> None:
        """`fresh`: white space before any text is left out."""
        self._fresh = fresh
        self._held: list[str] = []
        self.held = 0  # characters

    def push(self, text: str) -> str:
        """What is text now: what was held back, and the new up to its last white space."""
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._hold(text)
            return ""
        self._fresh = False
        shown = self.take() + kept
        self._hold(text[len(kept) :])
        return shown

    def take(self) -> str:
        """What is held back; it is no more."""
        held = "".join(self._held)
        self._held.clear()
        self.held = 0
        return held

    def _hold(self, blank: str) -> None:
        if blank:
            self._held.append(blank)
            self.held += len(blank)


def _overlap(text: str, triggers: Collection[str]) -> int:
    """Length of the longest end of the text that may begin a trigger."""
    longest = 0
    for trigger in triggers:
        for size in range(min(len(trigger) - 1, len(text)), longest, -1):
            if text.endswith(trigger[:size]):
                longest = size
                break
    return longest
