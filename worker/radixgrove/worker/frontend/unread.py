"""How many bytes of answers wait for clients to read them, in one frontend."""

from __future__ import annotations

from typing import Protocol

from radixgrove.worker.messages import Refused, Tokens

# Of one stream to a client that does not read. A reader that stops for a second loses nothing.
MAX_STREAM_BYTES = 32 << 20
# Of one answer that is sent whole, in the end.
MAX_WHOLE_BYTES = 256 << 20
# Of all answers of a process.
MAX_ALL_BYTES = 512 << 20

# What Python's objects take, roughly: of a message, a token, its log-probability, an alternative's.
_MESSAGE, _TOKEN, _SCORED, _ALTERNATIVE = 400, 36, 200, 150


def size_of(message: Tokens | Refused) -> int:
    """Bytes that a message takes until it is read, roughly."""
    if isinstance(message, Refused):
        return _MESSAGE
    size = _MESSAGE + _TOKEN * len(message.token_ids)
    for scores in (message.logprobs, message.prompt_logprobs):
        if scores:
            last = scores[-1]  # of a prompt's, the first is None
            alternatives = len(last.top) if last is not None else 0
            size += len(scores) * (_SCORED + _ALTERNATIVE * alternatives)
    return size


class Answering(Protocol):
    """A request in flight."""

    unread: int
    most_unread: int

    def end_unread(self) -> None: ...


class Unread:
    """The bytes of all requests. One that takes too many is ended; of all together, the largest."""

    def __init__(self) -> None:
        self._bytes = 0
        self._holders: set[Answering] = set()

    def add(self, holder: Answering, size: int) -> None:
        before = holder.unread
        holder.unread += size
        self._bytes += size
        self._holders.add(holder)
        if before and holder.unread > holder.most_unread:
            holder.end_unread()
        elif self._bytes > MAX_ALL_BYTES:
            max(self._holders, key=lambda other: other.unread).end_unread()

    def give_back(self, holder: Answering, size: int) -> None:
        holder.unread -= size
        self._bytes -= size
        if not holder.unread:
            self._holders.discard(holder)
