"""The requests that are alive, how each of them ends, and what the frontends hear of it."""

from __future__ import annotations

from collections import defaultdict

from radixgrove.worker.messages import Finish, RefusalReason, Refused, Submit, Tokens
from radixgrove.worker.scheduler.admission import Admission
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.estimate import QueuePace
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import Request, RequestState

Output = Tokens | Refused


class Outbox:
    """What the frontends are to get, by frontend."""

    def __init__(self) -> None:
        self.waiting: defaultdict[int, list[Output]] = defaultdict(list)

    def put(self, frontend: int, output: Output) -> None:
        self.waiting[frontend].append(output)

    def take(self) -> dict[int, list[Output]]:
        """Everything since the last call."""
        outputs, self.waiting = self.waiting, defaultdict(list)
        return outputs


class Lifecycle:
    """Owns every live request. Each leaves by `_end`, whatever held it."""

    def __init__(
        self, queue: WaitingQueue, admission: Admission, pace: QueuePace, counters: Counters
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.outbox = Outbox()
        self._queue = queue
        self._admission = admission
        self._pace = pace
        self._counters = counters

    def enter(self, request: Request) -> None:
        """A request waits for its row from now on."""
        self.requests[request.request_id] = request
        self._queue.add(request)
        if request.reads_cache:
            self._queue.look_up(request)

    def finish(self, request: Request) -> None:
        """It has all its tokens; the caller sends the last of them."""
        self._end(request, RequestState.FINISHED)
        self._admission.estimator.observe(len(request.output), request.limit)
        self._counters.finished += 1

    def finish_now(self, request: Request, finish: Finish) -> None:
        """End it with a message without tokens."""
        message = Tokens(request_id=request.request_id, token_ids=[], finish=finish)
        if not request.answered:
            self.introduce(request, message)
        self.outbox.put(request.frontend, message)
        self.finish(request)

    @staticmethod
    def introduce(request: Request, message: Tokens) -> None:
        """What only a request's first message says."""
        request.answered = True
        request.says_more = request.wants_logprobs
        message.cached_tokens = request.cached_tokens
        if request.submit.sampling.prompt_logprobs is not None:
            message.prompt_logprobs = request.prompt_logprobs

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; one that has already ended is left alone."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, RequestState.ABORTED)
            self._counters.aborted += 1
            self.outbox.put(
                request.frontend, Tokens(request_id=request_id, token_ids=[], finish=Finish.ABORT)
            )

    def refuse(self, request: Request, reason: RefusalReason, detail: str) -> None:
        self._end(request, RequestState.REFUSED)
        retry = self._pace.retry_after(len(self._queue))
        self.outbox.put(
            request.frontend,
            Refused(
                request_id=request.request_id,
                reason=reason,
                detail=detail,
                retry_after=retry if reason is RefusalReason.QUEUE_TIMEOUT else None,
            ),
        )

    def refuse_expired(self, now: float) -> None:
        """Requests that have waited for a row until their deadline."""
        for request in self._queue.expired(now):
            self.refuse(
                request, RefusalReason.QUEUE_TIMEOUT, "The request waited too long in the queue."
            )

    def fail(self, submit: Submit, detail: str) -> None:
        """End one request that could not be handled, known already or not."""
        request = self.requests.get(submit.request_id)
        if request is not None:
            self.refuse(request, RefusalReason.INTERNAL, detail)
        else:
            self.outbox.put(
                submit.frontend,
                Refused(request_id=submit.request_id, reason=RefusalReason.INTERNAL, detail=detail),
            )

    def _end(self, request: Request, state: RequestState) -> None:
        if request.active is not None:
            self._admission.free_row(request)
        else:
            self._admission.leave_queue(request)
        request.become(state)
        request.rules = None  # a matcher may be large
        del self.requests[request.request_id]
