"""A bounded cache of prompts' pieces, by what came before them."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from radixgrove.protocol.blocks import TOKEN_BYTES, BlockHasher

DEFAULT_CACHE_BYTES = 256 << 20


class Piece(msgspec.Struct):
    """One cut of a prompt, behind a given path of earlier ones."""

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

    def lookup(self, root: int, texts: list[str]) -> list[Piece]:
        """The longest known path, as pieces."""
        found: list[Piece] = []
        keys: list[tuple[int, str]] = []
        path = root
        with self._lock:
            for text in texts:
                key = (path, text)
                piece = self._pieces.get(key)
                if piece is None:
                    break
                found.append(piece)
                keys.append(key)
                path = piece.serial
            for key in reversed(keys):
                self._pieces.move_to_end(key)
        return found

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
        key = (last.serial if last else root, text)
        cost = 4 * len(text) + len(token_ids) + len(hashes) + 512
        with self._lock:
            self._serial += 1
            piece = Piece(self._serial, token_ids, hashes, parent, tail, cost)
            known = self._pieces.setdefault(key, piece)
            if known is not piece:
                return known
            self._bytes += cost
            while self._bytes > self._max_bytes:
                _, evicted = self._pieces.popitem(last=False)
                self._bytes -= evicted.cost
        return piece
