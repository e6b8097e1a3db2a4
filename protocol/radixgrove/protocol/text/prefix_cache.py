"""A bounded cache of prompts' pieces, by what came before them."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from radixgrove.protocol.blocks import TOKEN_BYTES, BlockHasher

DEFAULT_CACHE_BYTES = 256 << 20


class Piece(msgspec.Struct):
    """One cut of a prompt, behind a given path of earlier ones."""

    before: int  # names the path that it continues
    text: str
    serial: int  # names the path: the key of what follows it
    token_ids: bytes
    hashes: bytes  # of the blocks that end within this piece
    parent: bytes | None  # hash of the last full block up to here
    tail: bytes  # ids since that block
    cost: int


class PrefixCache:
    """Pieces of prompts by (path before them, text), least recently used first out.

    A piece is younger than those that follow it, so leaves go first. Thread-safe; encoding happens
    outside the lock, and two threads that encode the same piece get equal results.
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pieces: OrderedDict[tuple[int, str], Piece] = OrderedDict()
        self._latest: dict[int, Piece] = {}  # by the path before it: the one that was last there
        self._serial = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Estimated bytes held."""
        return self._bytes

    def new_root(self) -> int:
        """Names the path of no pieces, of one encoder."""
        with self._lock:
            self._serial += 1
            return self._serial

    def follow(self, path: int, text: str, start: int) -> tuple[list[Piece], int]:
        """Pieces that a text has from `start` on, each the one that was last there; their end.

        Comparing costs a fraction of cutting and looking up: the text is neither copied nor hashed.
        """
        found: list[Piece] = []
        with self._lock:
            while (piece := self._latest.get(path)) and text.startswith(piece.text, start):
                found.append(piece)
                path = piece.serial
                start += len(piece.text)
        return found, start

    def get(self, path: int, text: str) -> Piece | None:
        """The piece of that text behind a path, where it is known."""
        with self._lock:
            return self._pieces.get((path, text))

    def use(self, path: list[Piece]) -> None:
        """Makes pieces that follow each other the last ones that are evicted, or compared with."""
        with self._lock:
            for piece in reversed(path):
                key = (piece.before, piece.text)
                if self._pieces.get(key) is piece:  # it may have been evicted meanwhile
                    self._pieces.move_to_end(key)
                    self._latest[piece.before] = piece

    def extend(
        self,
        root: int,
        path: list[Piece],
        text: str,
        token_ids: bytes,
        hasher: BlockHasher | None,
    ) -> Piece:
        """Add the piece that follows `path`; evicts what no longer fits."""
        last = path[-1] if path else None
        parent, tail = (last.parent, last.tail) if last else (None, b"")
        hashes = b""
        if hasher is not None:
            tail += token_ids
            hashes = hasher.chain(tail, parent)
            if hashes:
                block = hasher.block_size * TOKEN_BYTES
                parent = hashes[-len(hasher.root) :]
                tail = tail[len(tail) - len(tail) % block :]
        before = last.serial if last else root
        key = (before, text)
        cost = 4 * len(text) + len(token_ids) + len(hashes) + 640
        with self._lock:
            self._serial += 1
            piece = Piece(before, text, self._serial, token_ids, hashes, parent, tail, cost)
            known = self._pieces.setdefault(key, piece)
            if known is not piece:
                return known
            self._bytes += cost
            self._latest[before] = piece
            while self._bytes > self._max_bytes:
                _, evicted = self._pieces.popitem(last=False)
                self._bytes -= evicted.cost
                if self._latest.get(evicted.before) is evicted:
                    del self._latest[evicted.before]
        return piece
