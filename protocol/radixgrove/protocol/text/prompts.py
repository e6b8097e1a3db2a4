"""From requests to token ids: rendered conversations, tokenizer, and a bounded cache of prefixes.

Only a template's own special tokens control the model: those that `renderer` left broken in what
users typed are encoded without special parsing. (A text completion's prompt is raw by definition:
special tokens in it count.)

A rendered prompt is cut right before its special tokens. No merge crosses them, so the pieces'
ids, concatenated, are exactly the whole's. `PrefixCache` remembers pieces by their path from the
start, with their block hashes: the next turn of a long conversation costs only its new text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from radixgrove.protocol.blocks import TOKEN_BYTES, BlockHasher
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.requests import ChatRequest, CompletionRequest, ModelLimits
from radixgrove.protocol.text.budget import EncodingBudget
from radixgrove.protocol.text.prefix_cache import Piece, PrefixCache
from radixgrove.protocol.text.renderer import ChatRenderer
from radixgrove.protocol.text.tokenizer import (
    SpecialTokens,
    TokenizerFiles,
    most_characters,
    panics_are_errors,
)
from radixgrove.protocol.text.user_text import BREAK, without_sentinels
from radixgrove.protocol.text.words import WordIds

# Text that is new to the cache up to this long is encoded in place: a thread costs more.
INLINE_CHARS = 4096
# Beyond that even rendering, cutting and looking up take milliseconds.
RENDER_INLINE_CHARS = 128 << 10
# Pieces up to this long (a role's header, the end of a message) come again behind every new text:
# their ids are kept apart from what came before them.
SHORT_CHARS = 64
MAX_SHORT_PIECES = 4096
T = TypeVar("T")


class EncodedPrompt(msgspec.Struct, frozen=True):
    """Token ids, int32 little-endian, and the chain hashes of their full blocks (if asked for)."""

    token_ids: bytes
    hashes: bytes

    def __len__(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


def _go_on() -> None:
    """Work on the loop itself cannot be abandoned."""


class PromptEncoder:
    """Renders and tokenizes for one model; one per process, used from any thread."""

    def __init__(
        self,
        files: TokenizerFiles,
        hasher: BlockHasher | None = None,
        cache: PrefixCache | None = None,
        budget: EncodingBudget | None = None,
    ) -> None:
        """
        Args:
            cache, budget: those of the process, if it has encoders of several models.

        Raises:
            TokenizerError: the files do not make a tokenizer.
            ValueError: as `ChatRenderer`.
            UnknownFormatError: as `TokenizerFiles.format`.
        """
        self.digest = files.digest
        self.tokenizer = files.tokenizer()
        self.format = files.format
        markers = self.format.all_markers
        self.special = SpecialTokens.of(self.tokenizer, markers)
        self._literal = files.tokenizer()  # reads special tokens as plain text
        self._literal.encode_special_tokens = True
        self._special_ids = frozenset(self.special.ids.values())
        self._words = None if self.special.normalized else WordIds.of(self.tokenizer)
        self.renderer = ChatRenderer(files, self.special.ids)
        self._hasher = hasher
        self.cache = cache if cache is not None else PrefixCache()
        self._root = self.cache.new_root()
        self._budget = budget if budget is not None else EncodingBudget()
        self._most_characters = most_characters(self.tokenizer)  # of one token
        vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(vocabulary.values(), default=-1) + 1
        self._short: dict[str, bytes] = {}
        # What the tokenizer itself puts before a text prompt: BOS, for most models.
        self._prefix = _added_before(self.tokenizer)
        self._prefix_texts = tuple(
            text for text, number in self.special.ids.items() if number in self._prefix
        )

    # ---- entry points ------------------------------------------------------------------------

    async def chat_prompts(self, request: ChatRequest, limits: ModelLimits) -> list[EncodedPrompt]:
        """As `encode_chat`, off the event loop when that takes long.

        Raises:
            ApiError: 400; also for a prompt that is longer than the model, or has a token that the
                model lacks.
        """
        return await self._off_loop(
            _chat_length(request), lambda: self._plan_chat(request, limits), limits, "messages"
        )

    async def completion_prompts(
        self, request: CompletionRequest, limits: ModelLimits
    ) -> list[EncodedPrompt]:
        """As `encode_completion`; see `chat_prompts`."""
        length = sum(len(prompt) for prompt in request.prompts)
        return await self._off_loop(
            length, lambda: self._plan_completions(request, limits), limits, "prompt"
        )

    async def text_prompt(self, text: str, limits: ModelLimits, *, special: bool) -> EncodedPrompt:
        """A text as it stands; `special`: behind what the tokenizer puts before a text."""
        prompts = await self._off_loop(
            len(text), lambda: [self._plan_text(text, special=special)], limits, "prompt"
        )
        return prompts[0]

    async def text_of(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens as they read."""
        return await self._for_ids(
            token_ids, lambda: str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        )

    async def pieces(self, token_ids: list[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        name = self.tokenizer.id_to_token
        return await self._for_ids(token_ids, lambda: [name(each) or "" for each in token_ids])

    async def _for_ids(self, token_ids: list[int], work: Callable[[], T]) -> T:
        with panics_are_errors():
            if len(token_ids) <= INLINE_CHARS:
                return work()
            return await self._budget.run(len(token_ids), lambda _: work())

    async def _off_loop(
        self,
        length: int,
        make_plans: Callable[[], list[_Plan]],
        limits: ModelLimits,
        param: str,
    ) -> list[EncodedPrompt]:
        """`length`: characters, or token ids, of a request's texts."""
        if length > RENDER_INLINE_CHARS:
            prompts = await self._budget.run(
                length, lambda check: self._finish_all(make_plans(), check)
            )
        else:
            plans = make_plans()
            new = sum(plan.new_chars for plan in plans)
            if new <= INLINE_CHARS:
                prompts = self._finish_all(plans)
            else:
                prompts = await self._budget.run(new, lambda check: self._finish_all(plans, check))
        if self._size > limits.vocab_size:
            self._refuse_unknown(prompts, limits, param)
        return prompts

    def _plan_chat(self, request: ChatRequest, limits: ModelLimits | None = None) -> list[_Plan]:
        text = self.renderer.render(request)
        self._refuse_long(text, limits, "messages")
        return [self._plan(text)]

    def _plan_completions(
        self, request: CompletionRequest, limits: ModelLimits | None = None
    ) -> list[_Plan]:
        for prompt in request.prompts:
            self._refuse_long(prompt, limits, "prompt")
        return [self._plan_completion(prompt, request.special) for prompt in request.prompts]

    def _refuse_long(self, prompt: str | list[int], limits: ModelLimits | None, param: str) -> None:
        """By its characters, long before it is tokenized."""
        if limits is None or self._most_characters is None or not isinstance(prompt, str):
            return
        least = -(-len(prompt) // self._most_characters)
        if least > limits.max_model_len:
            raise errors.context_length_exceeded(limits.max_model_len, least, 1, param)

    def _refuse_unknown(
        self, prompts: list[EncodedPrompt], limits: ModelLimits, param: str
    ) -> None:
        for index, prompt in enumerate(prompts):
            largest = max(memoryview(prompt.token_ids).cast("i"), default=0)
            if largest >= limits.vocab_size:
                place = param if len(prompts) == 1 else f"{param}[{index}]"
                token = self.tokenizer.id_to_token(largest)
                raise errors.invalid(
                    f"'{place}' has the token {token!r}, which this model's tokenizer knows and "
                    "the model does not.",
                    place,
                )

    def _finish_all(
        self, plans: list[_Plan], check: Callable[[], None] = _go_on
    ) -> list[EncodedPrompt]:
        with panics_are_errors():
            return [self._finish(plan, check) for plan in plans]

    def encode_chat(self, request: ChatRequest) -> EncodedPrompt:
        """
        Raises:
            ApiError: 400, when the model has no chat template or it refuses the messages.
        """
        return self._finish_all(self._plan_chat(request))[0]

    def encode_completion(self, request: CompletionRequest) -> list[EncodedPrompt]:
        """
        Raises:
            ApiError: 400, when a prompt is empty and the model has no begin-of-text token.
        """
        return self._finish_all(self._plan_completions(request))

    def hash_blocks(self, token_ids: bytes) -> bytes:
        """Chain hashes of a prompt's full blocks; empty without a hasher."""
        return self._hasher.chain(token_ids) if self._hasher is not None else b""

    # ---- encoding ----------------------------------------------------------------------------

    def _plan(self, text: str, prefix: bytes = b"") -> _Plan:
        """Cuts a text into pieces, each but the first beginning with a special token.

        Where a text goes on as an earlier one did, so do its cuts: up to the last behind which both
        are still equal for the length of any token, which may begin there, or before.
        """
        known: list[Piece] = []
        new: list[str] = []
        path, start, equal = self._root, 0, 0
        cuts = self._cuts(text, start)
        while start < len(text):
            if start >= equal and not new:
                followed, equal = self.cache.follow(path, text, start)
                end = equal
                while followed and end + self.special.finder.longest > equal:
                    end -= len(followed.pop().text)
                if followed:
                    known += followed
                    path, start = followed[-1].serial, end
                    cuts = self._cuts(text, start)
                    continue
            end = next(cuts, len(text))
            piece = self.cache.get(path, text[start:end]) if not new else None
            if piece is None:
                new.append(text[start:end])
            else:
                known.append(piece)
                path = piece.serial
            start = end
        self.cache.use(known)
        return _Plan(prefix, known, new)

    def _plan_completion(self, prompt: str | list[int], special: bool) -> _Plan:
        if not isinstance(prompt, str):
            return _Plan(array("i", prompt).tobytes(), [], [])
        prompt = without_sentinels(prompt)
        if not prompt and not (special and self._prefix):
            raise errors.invalid("'prompt' must not be empty.", "prompt")
        return self._plan_text(prompt, special=special)

    def _plan_text(self, text: str, *, special: bool) -> _Plan:
        text = without_sentinels(text)
        if not special or text.startswith(self._prefix_texts):  # one BOS, the client's or ours
            return self._plan(text)
        return self._plan(text, array("i", self._prefix).tobytes())

    def _finish(self, plan: _Plan, check: Callable[[], None]) -> EncodedPrompt:
        pieces = list(plan.known)
        for text in plan.new:
            check()
            token_ids = self._encode_piece(text)
            piece = self.cache.extend(self._root, pieces, text, token_ids, self._hasher)
            pieces.append(piece)
        body = b"".join([piece.token_ids for piece in pieces])
        if plan.prefix:
            token_ids = plan.prefix + body
            return EncodedPrompt(token_ids, self.hash_blocks(token_ids))
        return EncodedPrompt(body, b"".join([piece.hashes for piece in pieces]))

    def _cuts(self, text: str, start: int) -> Iterator[int]:
        """Where pieces of a text end, from a cut on; not the last of them."""
        cuts = self.special.cuts
        for match in self.special.finder.find(text, start):
            if match.start() > start and match[0] in cuts:
                yield match.start()

    def _encode_piece(self, text: str) -> bytes:
        """Ids of one piece; control tokens only where the sentinel-bearing text has them."""
        if len(text) > SHORT_CHARS:
            by_words = self._ids_by_words(text) if len(text) <= INLINE_CHARS else None
            return by_words or array("i", self._piece_ids(text)).tobytes()
        token_ids = self._short.get(text)
        if token_ids is None:
            token_ids = array("i", self._piece_ids(text)).tobytes()
            if len(self._short) >= MAX_SHORT_PIECES:
                self._short.clear()
            self._short[text] = token_ids
        return token_ids

    def _ids_by_words(self, text: str) -> bytes | None:
        """Ids of a text with no added token, but perhaps one at its beginning; None: of another."""
        if self._words is None:
            return None
        head = b""
        for match in self.special.finder.find(text):
            if match.start() > 0 or match[0] not in self.special.heads:
                return None
            head = array("i", [self.special.ids[match[0]]]).tobytes()
            text = text[match.end() :]
        rest = self._words.encode(text)
        return head + rest if rest is not None else None

    def _piece_ids(self, text: str) -> list[int]:
        clean = text.replace(BREAK, "") if BREAK in text else text
        # Without offsets, which are not needed here: a fifth faster.
        encoded = self.tokenizer.encode_batch_fast([clean], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        if len(clean) == len(text) and not self.special.normalized:
            return ids
        expected = [self.special.ids[token] for token in self._special_texts(text)]
        if [number for number in ids if number in self._special_ids] != expected:
            return self._encode_literally(text)
        return ids

    def _special_texts(self, text: str) -> list[str]:
        found = (match[0] for match in self.special.finder.find(text))
        return [token for token in found if token in self.special.ids]

    def _encode_literally(self, text: str) -> list[int]:
        """A piece in which a user typed special tokens: those stay text, the template's do not."""
        ids: list[int] = []
        start = 0
        for match in self.special.finder.find(text):
            if match[0] in self.special.ids:
                ids += self._literal_ids(text[start : match.start()])
                ids.append(self.special.ids[match[0]])
                start = match.end()
        return ids + self._literal_ids(text[start:])

    def _literal_ids(self, text: str) -> list[int]:
        """Ids of text that has none of the template's tokens; never a control token."""
        ids: list[int] = self._literal.encode(text.replace(BREAK, ""), add_special_tokens=False).ids
        if self._special_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary has the token's text as a piece: encode its parts apart.
        parts = [self._literal.encode(part, add_special_tokens=False) for part in text.split(BREAK)]
        return [number for part in parts for number in part.ids if number not in self._special_ids]


class _Plan(msgspec.Struct):
    """A prompt cut into pieces, the first of which the cache knows."""

    prefix: bytes  # ids before the first piece
    known: list[Piece]
    new: list[str]

    @property
    def new_chars(self) -> int:
        return sum([len(text) for text in self.new])


def _chat_length(request: ChatRequest) -> int:
    """Characters of a conversation's texts, those of its tools among them."""
    return (
        (0 if request.tools is None else request.tools.size)
        + sum([len(message.content or "") for message in request.messages])
        + sum(
            len(part.text or "")
            for message in request.messages
            if isinstance(message.content, list)
            for part in message.content
        )
    )


def _added_before(tokenizer: Tokenizer) -> list[int]:
    """Ids that the tokenizer's post-processor puts before a text."""
    with panics_are_errors():
        plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []
