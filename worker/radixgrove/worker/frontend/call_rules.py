"""What a chat request's tools and reasoning mean for the tokens of its answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from radixgrove.protocol.formats.grammar import CallGrammar, Extent
from radixgrove.protocol.formats.shapes import Calls, Channels, Format, JsonBody
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.requests import ChatRequest
from radixgrove.protocol.openai.tools import ToolMode
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.messages import ReasoningRule


class Thoughts(Enum):
    """Where a prompt leaves the model."""

    OPEN = "open"  # within a block of reasoning
    CLOSED = "closed"  # behind one, which the template closed
    NONE = "none"  # it may begin one


@dataclass(frozen=True, slots=True)
class RulePlan:
    """Rules of a request, its grammar yet to be compiled. See `TokenRules`."""

    calls: CallGrammar | None = None
    reasoning: ReasoningRule | None = None
    triggers: tuple[int, ...] = ()
    again: bool = False
    banned: tuple[tuple[int, ...], ...] = ()


def plan_rules(
    request: ChatRequest,
    form: Format,
    markers: Markers,
    thoughts: Thoughts,
    eos_ids: Collection[int],
    *,
    schemas: bool,
) -> RulePlan:
    """
    Args:
        schemas: arguments of tools that are not `strict` are held to their schemas too.

    Raises:
        ApiError: 400, for tools with calls that would not be understood, and for a block of
            reasoning that no token ends.
    """
    tools, calls = request.tools, form.calls
    if tools is not None and calls is None and tools.mode is not ToolMode.NONE:
        raise errors.unsupported(
            "tools",
            "How this model calls tools is not known: its operator can set 'output_format'.",
        )
    grammar: CallGrammar | None = None
    triggers: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    again = False
    if isinstance(calls, Channels):
        return _of_messages(request, calls, schemas=schemas)
    if tools is not None and calls is not None:
        trigger = markers.tokens(calls.trigger)
        # Bare calls begin without it, and of several tokens the first may begin something else.
        begins = trigger[0] if len(trigger) == 1 and not calls.bare else None
        if tools.mode is ToolMode.NONE:
            banned = (trigger[:2],) if trigger else ()
        else:
            constraint = request.generation.constraint
            extent = _extent(tools.mode, begins, free=constraint is None)
            grammar = CallGrammar(calls, tools.offered, tools.parallel, schemas, extent, constraint)
            if extent is Extent.REST and begins is not None:
                triggers = (begins,)
                listed = isinstance(calls.body, JsonBody) and calls.body.listed
                again = tools.parallel and not calls.section[0] and not listed
    bound = grammar is not None or request.generation.constraint is not None
    reasoning = None
    if bound or request.max_reasoning_tokens is not None:
        reasoning = _reasoning(request, form, markers, thoughts)
    if reasoning is not None and bound and not triggers:
        reasoning.banned += tuple(eos_ids)
    return RulePlan(grammar, reasoning, triggers, again, banned)


def _no_budget() -> errors.ApiError:
    return errors.unsupported(
        "max_reasoning_tokens",
        "'max_reasoning_tokens' is not supported for the way in which this model writes reasoning.",
    )


def _of_messages(request: ChatRequest, channels: Channels, *, schemas: bool) -> RulePlan:
    """The grammar is of the whole output, its thoughts included."""
    tools, constraint = request.tools, request.generation.constraint
    if request.max_reasoning_tokens is not None:
        raise _no_budget()
    if tools is None and constraint is None:
        return RulePlan()
    called = tools is not None and tools.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    offered = () if tools is None or tools.mode is ToolMode.NONE else tools.offered
    extent = Extent.CALLS if called else Extent.ANSWER
    return RulePlan(CallGrammar(channels, offered, False, schemas, extent, constraint))


def _extent(mode: ToolMode, trigger: int | None, *, free: bool) -> Extent:
    if mode is not ToolMode.AUTO:
        return Extent.CALLS
    return Extent.REST if trigger is not None and free else Extent.ANSWER


def _reasoning(
    request: ChatRequest, form: Format, markers: Markers, thoughts: Thoughts
) -> ReasoningRule | None:
    if form.reasoning is None or thoughts is Thoughts.CLOSED:
        return None
    end = markers.tokens(form.reasoning.end)
    begin = markers.first(form.reasoning.begin)
    opened = thoughts is Thoughts.OPEN
    around = markers.tokens(form.calls.around[0]) if isinstance(form.calls, Calls) else ()
    if around and not opened:
        return None  # the prompt says whether the model reasons; its first token says nothing
    if not end or begin is None:
        if request.max_reasoning_tokens is not None:
            raise _no_budget()
        if opened:
            param = "tools" if request.generation.constraint is None else "response_format"
            raise errors.unsupported(
                param, f"'{param}' is not supported where this model reasons: turn that off."
            )
        return None
    return ReasoningRule(
        end=end[0],
        tail=end[1:],
        open=opened,
        begin=None if opened else begin,
        budget=request.max_reasoning_tokens,
        calls=form.reasoning.ends_at_calls,
        banned=around[:1],  # an answer that begins before the block has ended
    )
