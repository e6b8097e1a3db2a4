"""From a request body to what placement and the worker need: token ids and index members.

Services with registered replicas are encoded with the model's own tokenizer, fetched from a replica
by digest. Others (foreign engines) are tracked by a hash chain over the prompt's text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import aiohttp
import msgspec

from radixgrove.protocol.blocks import (
    HASH_BYTES,
    MEMBER_BYTES,
    BlockHasher,
    members,
)
from radixgrove.protocol.endpoints import Endpoint
from radixgrove.protocol.envelope import INTERNAL_KEY_HEADER
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import MAX_SEQUENCES
from radixgrove.protocol.openai.decoding import decode
from radixgrove.protocol.openai.requests import Request
from radixgrove.protocol.registry import Registration
from radixgrove.protocol.settings import Sharing
from radixgrove.protocol.text.budget import EncodingBudget
from radixgrove.protocol.text.prefix_cache import PrefixCache
from radixgrove.protocol.text.prompts import EncodedPrompt, PromptEncoder
from radixgrove.protocol.text.tokenizer import (
    MAX_FILE_BYTES,
    TOKENIZER_FILES,
    TokenizerError,
    TokenizerFiles,
)
from radixgrove.router import metrics
from radixgrove.router.fleet import Fleet
from radixgrove.router.placement import PlacementRequest
from radixgrove.router.replicas import Replica, Service
from radixgrove.service.auth import sharing_domain
from radixgrove.service.tokenization import ModelText

logger = logging.getLogger(__name__)

MAX_ENCODERS = 16
MAX_DOMAINS = 4096
MAX_PATHS = 16  # prompts of a request that are looked up in the index
FETCH_TIMEOUT = aiohttp.ClientTimeout(total=20.0, sock_read=5.0)
FETCH_RETRY_SECONDS = 1.0
FETCH_NEXT_SECONDS = 0.5  # without files from one replica, another is asked too
ENCODER_WAIT = 10.0  # a request waits that long for a tokenizer on its way
TEXT_BLOCK = 256  # bytes of prompt text that make a block for foreign engines
BYTES_PER_TOKEN = 4  # a rule of thumb; only proportions matter


class ForeignBody(msgspec.Struct):
    """What the router reads of a request for a foreign engine, which checks the rest itself."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    n: int | None = None
    cache_salt: msgspec.Raw = msgspec.Raw()


_foreign_decoder = msgspec.json.Decoder(ForeignBody)


@dataclass(slots=True)
class Encoded:
    """A request ready to be placed."""

    model: str  # as the client named it
    ask: PlacementRequest
    prompts: list[bytes] | None  # token ids; None: the worker tokenizes
    digest: str  # of the tokenizer that made them


_Key = tuple[str, str]  # tokenizer digest, root fingerprint


@dataclass(slots=True)
class _ModelEncoder:
    encoder: PromptEncoder
    hasher: BlockHasher
    domains: dict[str, int] = field(default_factory=dict)

    def domain64(self, domain: str) -> int:
        tag = self.domains.get(domain)
        if tag is None:
            if len(self.domains) >= MAX_DOMAINS:
                self.domains.clear()
            tag = self.domains[domain] = self.hasher.domain64(domain)
        return tag


class Encoders:
    """One encoder per tokenizer and namespace, least recently used first out."""

    def __init__(
        self,
        fleet: Fleet,
        session: Callable[[], aiohttp.ClientSession],
        cache_bytes: int,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._known: OrderedDict[_Key, _ModelEncoder] = OrderedDict()
        self._fetching: dict[_Key, asyncio.Task[_ModelEncoder | None]] = {}
        self._retry_at: dict[_Key, float] = {}  # monotonic, after a failure
        # One bound each, however many services there are.
        self._cache = PrefixCache(cache_bytes)
        self._budget = EncodingBudget()

    async def encode(
        self, endpoint: Endpoint[Any], service: Service, body: bytes, principal: str
    ) -> Encoded:
        """Parses, validates, renders, tokenizes and hashes.

        Raises:
            ApiError: 400, the request is malformed or does not fit the model.
        """
        registration, limits = service.registration, service.limits
        if registration is None or limits is None:
            return encode_foreign(body)
        started = time.perf_counter()
        request: Request = endpoint.parse(body, limits)
        generation = request.generation
        model = await self._get(service, registration)
        if model is None:  # no tokenizer to be had: the worker tokenizes, the index is not asked
            plain = encode_foreign(body)
            plain.ask.members = b""
            return plain
        prompts = await endpoint.encode(model.encoder, request, limits)
        for prompt in prompts:
            generation.max_tokens_for(len(prompt), limits)
        block = registration.index_block
        paths: list[tuple[bytes, int]] = []
        if generation.prefix_cache and generation.sampling.prompt_logprobs is None:
            shared = registration.sharing == Sharing.SHARED
            sharing = Sharing.SHARED if shared else Sharing.PRIVATE
            domain = model.domain64(sharing_domain(sharing, principal, generation.cache_salt))
            paths = _paths(prompts, block, domain)
        repeated = sum(shared for _, shared in paths) * block
        ask = PlacementRequest(
            prompt_tokens=sum(map(len, prompts)) - repeated,
            members=paths[0][0] if paths else b"",
            block_tokens=block,
            sequences=generation.n * len(prompts),
            length=max(generation.length_for(len(prompt)) for prompt in prompts),
            others=paths[1:],
        )
        metrics.soon(metrics.ENCODE_SECONDS.observe, time.perf_counter() - started)
        ids = [prompt.token_ids for prompt in prompts]
        return Encoded(request.model, ask, ids, model.encoder.digest)

    async def text_of(self, name: str | None) -> ModelText:
        """What makes tokens for a model; `name`: None: for the only one.

        Raises:
            ApiError: 400, its servers have no tokenizer to be had; 404, 503.
        """
        service = self._fleet.resolve(name) if name is not None else self._fleet.only_service()
        if service is None:
            raise errors.invalid("You must provide a 'model' parameter.", "model")
        registration, limits = service.registration, service.limits
        if registration is None or limits is None:
            if service.replicas:
                raise errors.unsupported("model", "The servers of this model give no tokenizer.")
            raise errors.overloaded("No server of this model is there.", 2.0)
        model = await self._get(service, registration)
        if model is None:
            raise errors.overloaded("The tokenizer of this model cannot be had now.", 2.0)
        return ModelText(model.encoder, limits)

    async def prepare(self) -> None:
        """Fetches tokenizers of services as they appear, until cancelled."""
        while True:
            for service in list(self._fleet.services):
                if service.registration is not None:
                    await self._get(service, service.registration)
            await self._fleet.wait_for_change(FETCH_RETRY_SECONDS * 5)

    async def close(self) -> None:
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)

    # ---- tokenizers ------------------------------------------------------------------------

    async def _get(self, service: Service, registration: Registration) -> _ModelEncoder | None:
        key = (registration.tokenizer_digest, registration.root)
        model = self._known.get(key)
        if model is not None:
            self._known.move_to_end(key)
            return model
        trusted = any(replica.keys.internal_key for replica in service.replicas.values())
        if not trusted or time.monotonic() < self._retry_at.get(key, 0.0):
            return None
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.create_task(self._make(key, service, registration), name="tokenizer")
            self._fetching[key] = task
            task.add_done_callback(lambda _: self._fetching.pop(key, None))
        try:
            async with asyncio.timeout(ENCODER_WAIT):
                return await asyncio.shield(task)
        except TimeoutError:
            return None

    async def _make(
        self, key: _Key, service: Service, registration: Registration
    ) -> _ModelEncoder | None:
        replicas = [
            replica
            for replica in service.replicas.values()
            if (known := replica.registration) is not None
            and (known.tokenizer_digest, known.root) == key
        ]
        try:
            found = await self._fetch_any(replicas, registration.tokenizer_digest)
            if found is not None:
                replica, files = found
                hasher = replica.keys.hasher(registration)
                encoder = await asyncio.to_thread(
                    PromptEncoder, files, hasher, self._cache, self._budget
                )
                model = self._known[key] = _ModelEncoder(encoder, hasher)
                self._retry_at.pop(key, None)
                while len(self._known) > MAX_ENCODERS:
                    self._known.popitem(last=False)
                return model
        except ValueError as error:
            logger.warning("the tokenizer of service %s: %s", service.name, error)
        except Exception:  # of one service, whatever it is: other services go on
            logger.exception("the tokenizer of service %s cannot be used", service.name)
        logger.error("service %s has no tokenizer: its workers tokenize", service.name)
        if len(self._retry_at) >= MAX_DOMAINS:
            self._retry_at.clear()
        self._retry_at[key] = time.monotonic() + FETCH_RETRY_SECONDS
        return None

    async def _fetch_any(
        self, replicas: list[Replica], digest: str
    ) -> tuple[Replica, TokenizerFiles] | None:
        """From the first of the replicas that has given it; one that hangs does not hold up more
        than the start of the next."""
        waiting = deque(sorted(replicas, key=lambda replica: not replica.available()))
        fetches: dict[asyncio.Task[TokenizerFiles], Replica] = {}
        try:
            while waiting or fetches:
                if waiting:
                    replica = waiting.popleft()
                    fetches[asyncio.create_task(self._fetch(replica, digest))] = replica
                done, _ = await asyncio.wait(
                    fetches,
                    timeout=FETCH_NEXT_SECONDS if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    replica = fetches.pop(task)
                    try:
                        return replica, task.result()
                    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                        kind = type(error).__name__
                        logger.warning("no tokenizer from replica %s: %s", replica.id, kind)
            return None
        finally:
            for task in fetches:
                task.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _fetch(self, replica: Replica, digest: str) -> TokenizerFiles:
        """A replica's tokenizer files, bounded and checked against their digest."""
        contents: dict[str, bytes] = {}
        for name in TOKENIZER_FILES:
            url = f"{replica.url}/internal/tokenizer/{digest}/{name}"
            headers = {INTERNAL_KEY_HEADER: replica.keys.internal_key}
            request = self._session().get(
                url, headers=headers, timeout=FETCH_TIMEOUT, allow_redirects=False
            )
            async with request as response:
                if response.status == 404:
                    continue
                if response.status != 200:
                    raise TokenizerError(f"{name}: status {response.status}")
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_FILE_BYTES:
                        raise TokenizerError(f"{name} is too large")
                contents[name] = bytes(content)
        files = TokenizerFiles(contents)
        if files.digest != digest:
            raise TokenizerError("the files do not have the digest that was registered")
        return files


def _paths(prompts: list[EncodedPrompt], block: int, domain: int) -> list[tuple[bytes, int]]:
    """Members of each prompt, the longest first, and how many of them prompts before it have too.

    Of very many prompts the shortest are placed by their length alone.
    """
    seen: set[bytes] = set()
    paths = []
    for prompt in sorted(prompts, key=len, reverse=True)[:MAX_PATHS]:
        # The last token is always computed, so a prompt is never served from the cache whole.
        usable = (len(prompt) - 1) // block * HASH_BYTES
        packed = members(prompt.hashes[:usable], domain)
        if len(prompts) == 1:
            return [(packed, 0)]
        names = [packed[i : i + MEMBER_BYTES] for i in range(0, len(packed), MEMBER_BYTES)]
        # A block's name is that of the whole prefix: what is shared comes first.
        shared = sum(name in seen for name in names)
        seen.update(names)
        paths.append((packed, shared))
    return paths


def encode_foreign(body: bytes) -> Encoded:
    """A request that goes on as it came, tracked by the text of its prompt.

    Raises:
        ApiError: 400, what the router itself reads of it is malformed.
    """
    request = decode(_foreign_decoder, body)
    text = bytes(request.messages) or bytes(request.prompt)
    names, parent = [], bytes(request.cache_salt)
    for end in range(TEXT_BLOCK, len(text), TEXT_BLOCK):
        block = text[end - TEXT_BLOCK : end]
        parent = blake2b(parent + block, digest_size=MEMBER_BYTES).digest()
        names.append(parent)
    tokens = len(text) // BYTES_PER_TOKEN + 1
    ask = PlacementRequest(
        prompt_tokens=tokens,
        members=b"".join(names),
        block_tokens=TEXT_BLOCK // BYTES_PER_TOKEN,
        sequences=min(max(1, request.n or 1), MAX_SEQUENCES),
        length=0,  # unknown: the replica itself refuses what is too long
    )
    return Encoded(request.model or "", ask, None, "")
