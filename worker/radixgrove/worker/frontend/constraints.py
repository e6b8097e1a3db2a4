"""What requests ask of their answers, checked before the engine hears of it.

Compiling takes milliseconds, or seconds for a hostile one: it happens in threads, once for
equal constraints, and no longer than `grammar_timeout`. The threads' own bounds end what is given
up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import TOO_COMPLEX, Constraint, ConstraintError
from radixgrove.protocol.constraints.grammar import (
    Compiled,
    compile_constraint,
    compiler_threads,
    load_tokenizer,
)
from radixgrove.protocol.openai.requests import Generation
from radixgrove.protocol.openai.structured import refused
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.frontend.metrics import FrontendMetrics
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.messages import TokenRules

_THREADS = 2
_MOST_KEPT = 128  # compiled constraints, each as large as its schema


@dataclass(frozen=True, slots=True)
class Checked:
    """What the engine gets, and the keywords of a schema that it does not enforce."""

    rules: TokenRules | None = None
    ignored: tuple[str, ...] = ()


@dataclass(slots=True)
class _Check:
    """A constraint that is compiled, or was."""

    begun: asyncio.Event
    compiled: asyncio.Future[Compiled]

    async def result(self, seconds: float) -> Compiled:
        """
        Raises:
            ConstraintError: it is refused, or not compiled so many seconds after it was begun.
        """
        await self.begun.wait()
        try:
            return await asyncio.wait_for(asyncio.shield(self.compiled), seconds)
        except TimeoutError:
            raise ConstraintError(f"it took more than {seconds:g} s", TOO_COMPLEX) from None


class ConstraintCheck:
    """One per frontend process."""

    def __init__(
        self, model: ServedModel, settings: WorkerSettings, metrics: FrontendMetrics
    ) -> None:
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._threads = compiler_threads(_THREADS, "constraints")
        # Now, while the engine loads the weights: it would hold up the streams of others later.
        self._tokenizer = _load_tokenizer(model)
        self._checks: OrderedDict[bytes, _Check] = OrderedDict()

    async def check(self, generation: Generation) -> Checked:
        """
        Raises:
            ApiError: 400, naming the parameter.
        """
        constraint = generation.constraint
        compiled = None
        if constraint is not None:
            compiled = await self._compiled(constraint)
        banned: tuple[tuple[int, ...], ...] = ()
        if generation.bad_words:
            banned = await asyncio.to_thread(self._ids, generation.bad_words)
        if compiled is None and generation.allowed_token_ids is None and not banned:
            return Checked()
        rules = TokenRules(
            grammar=None if compiled is None else compiled.grammar,
            allowed=generation.allowed_token_ids,
            banned=banned,
        )
        return Checked(rules, () if compiled is None else compiled.ignored)

    async def _compiled(self, constraint: Constraint) -> Compiled:
        identity = f"{constraint.form}\0{constraint.strict}\0{constraint.text}"
        key = sha256(identity.encode()).digest()
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = self._begin(constraint)
            if len(self._checks) > _MOST_KEPT:
                self._checks.popitem(last=False)
        self._checks.move_to_end(key)
        try:
            return await check.result(self._settings.grammar_timeout)
        except ConstraintError as error:
            self._metrics.grammar_failures.labels(error.code or "invalid").inc()
            raise refused(error, constraint.param) from None

    def _begin(self, constraint: Constraint) -> _Check:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()
        tokenizer, whitespace = self._tokenizer, self._settings.json_whitespace

        def compile_it() -> Compiled:
            loop.call_soon_threadsafe(begun.set)
            if isinstance(tokenizer, ConstraintError):
                raise tokenizer
            started = time.monotonic()
            compiled = compile_constraint(constraint, tokenizer, whitespace)
            self._metrics.grammar_compile.observe(time.monotonic() - started)
            return compiled

        compiled = loop.run_in_executor(self._threads, compile_it)
        # Requests that waited may have left: the error then counts as seen.
        compiled.add_done_callback(lambda future: future.cancelled() or future.exception())
        return _Check(begun, compiled)

    def _ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word, as it stands at a text's beginning and behind a blank."""
        encode = self._model.encoder.tokenizer.encode
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        sequences = (tuple(encode(text, add_special_tokens=False).ids) for text in texts)
        return tuple(dict.fromkeys(ids for ids in sequences if ids))


def _load_tokenizer(model: ServedModel) -> LLTokenizer | ConstraintError:
    """Of a model; or why it has none for grammars, which only requests with one need to know."""
    text = model.encoder.tokenizer.to_str()
    try:
        return load_tokenizer(text, model.limits.vocab_size, model.eos_ids)
    except ConstraintError as error:
        return error
