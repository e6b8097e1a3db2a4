"""What requests ask of their answers, checked before the engine hears of it.

Compiling takes milliseconds, or seconds for a hostile one: it happens in threads, once for
equal constraints, and no longer than `grammar_timeout`. The threads' own bounds end what is given
up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import TOO_COMPLEX, Constraint, ConstraintError
from radixgrove.protocol.constraints.grammar import (
    Compiled,
    compile_constraint,
    compiler_threads,
    load_tokenizer,
)
from radixgrove.protocol.formats.grammar import CallGrammar, compile_calls
from radixgrove.protocol.formats.lark import ToolError
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.requests import ChatRequest, Generation, Request
from radixgrove.protocol.openai.structured import refused
from radixgrove.protocol.openai.tools import refused_parameters
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.worker.frontend.call_rules import RulePlan, plan_rules
from radixgrove.worker.frontend.metrics import FrontendMetrics
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.messages import TokenRules

Compiling = Callable[[LLTokenizer, int], Compiled]  # given the most white space in JSON

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

    async def check(self, request: Request, prompts: Sequence[EncodedPrompt]) -> Checked:
        """
        Raises:
            ApiError: 400, naming the parameter.
        """
        generation = request.generation
        self._refuse_stops_alone(generation)
        plan = self._plan(request, prompts)
        compiled = None
        if plan.calls is not None:
            compiled = await self._calls(plan.calls, generation.constraint)
        elif generation.constraint is not None:
            compiled = await self._compiled(generation.constraint)
        banned = plan.banned
        if generation.bad_words:
            banned += await asyncio.to_thread(self._ids, generation.bad_words)
        rules = TokenRules(
            grammar=None if compiled is None else compiled.grammar,
            reasoning=plan.reasoning,
            triggers=plan.triggers,
            again=plan.again,
            allowed=generation.allowed_token_ids,
            banned=banned,
        )
        if rules == TokenRules():
            return Checked()
        return Checked(rules, () if compiled is None else compiled.ignored)

    def _refuse_stops_alone(self, generation: Generation) -> None:
        """Where only tokens that end the answer are allowed, and none of those may come yet, the
        engine would have nothing to draw."""
        allowed, sampling = generation.allowed_token_ids, generation.sampling
        if allowed is None or not sampling.min_tokens:
            return
        ends = {*sampling.stop_token_ids, *(() if generation.ignore_eos else self._model.eos_ids)}
        if ends.issuperset(allowed):
            raise errors.invalid(
                "'allowed_token_ids' has only tokens that end the answer, which none may before "
                "'min_tokens'.",
                "allowed_token_ids",
            )

    def _plan(self, request: Request, prompts: Sequence[EncodedPrompt]) -> RulePlan:
        if not isinstance(request, ChatRequest):
            return RulePlan()
        return plan_rules(
            request,
            self._model.encoder.format,
            self._model.markers,
            self._model.thoughts_of(request, prompts[0]),
            self._model.eos_ids,
            schemas=self._settings.tools_strict,
        )

    async def _compiled(self, constraint: Constraint) -> Compiled:
        identity = f"{constraint.form}\0{constraint.strict}\0{constraint.text}"
        try:
            return await self._result(identity, partial(compile_constraint, constraint))
        except ConstraintError as error:
            raise refused(error, constraint.param) from None

    async def _calls(self, calls: CallGrammar, text: Constraint | None) -> Compiled:
        try:
            return await self._result(calls.identity, partial(compile_calls, calls))
        except ToolError as error:
            raise refused_parameters(error, error.param) from None
        except ConstraintError as error:
            raise refused(error, "tools" if text is None else text.param) from None

    async def _result(self, identity: str, compiling: Compiling) -> Compiled:
        """Compiled in a thread, once for equal ones."""
        key = sha256(identity.encode()).digest()
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = self._begin(compiling)
            if len(self._checks) > _MOST_KEPT:
                self._checks.popitem(last=False)
        self._checks.move_to_end(key)
        try:
            return await check.result(self._settings.grammar_timeout)
        except ConstraintError as error:
            self._metrics.grammar_failures.labels(error.code or "invalid").inc()
            raise

    def _begin(self, compiling: Compiling) -> _Check:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()
        tokenizer, whitespace = self._tokenizer, self._settings.json_whitespace

        def compile_it() -> Compiled:
            loop.call_soon_threadsafe(begun.set)
            if isinstance(tokenizer, ConstraintError):
                raise tokenizer
            started = time.monotonic()
            compiled = compiling(tokenizer, whitespace)
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
    try:
        return load_tokenizer(model.encoder.tokenizer, model.limits.vocab_size, model.eos_ids)
    except ConstraintError as error:
        return error
