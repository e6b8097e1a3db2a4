"""New requests: queued, or refused at once."""

from __future__ import annotations

import numpy as np

from radixgrove.worker.cache.node import CacheScope
from radixgrove.worker.messages import RefusalReason, Refused, Submit
from radixgrove.worker.scheduler.batch import Batch
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.estimate import QueuePace
from radixgrove.worker.scheduler.grammars import Grammars
from radixgrove.worker.scheduler.lifecycle import Lifecycle
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import Request, count_tokens


class Intake:
    """Turns what frontends submit into requests that wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        batch: Batch,
        pace: QueuePace,
        lifecycle: Lifecycle,
        grammars: Grammars,
    ) -> None:
        self._config = config
        self._queue = queue
        self._batch = batch
        self._pace = pace
        self._lifecycle = lifecycle
        self._grammars = grammars
        self._order = 0

    def submit(self, submit: Submit, now: float) -> None:
        refusal = self._malformed(submit) or self._too_many(submit)
        if refusal is not None:
            self._lifecycle.outbox.put(submit.frontend, refusal)
            return
        request = self._request(submit, now)
        self._lifecycle.enter(request)
        self._grammars.enter(request)

    def _request(self, submit: Submit, now: float) -> Request:
        config, sampling = self._config, submit.sampling
        prompt_len = count_tokens(submit.token_ids)
        deadline = now + config.queue_timeout
        if submit.queue_timeout is not None:
            deadline = min(deadline, now + submit.queue_timeout)
        self._order += 1
        return Request(
            request_id=submit.request_id,
            frontend=submit.frontend,
            prompt=submit.token_ids,
            prompt_len=prompt_len,
            submit=submit,
            scope=CacheScope(config.namespace, submit.domain),
            order=self._order,
            arrived=now,
            deadline=deadline,
            limit=min(sampling.max_tokens, config.max_model_len - prompt_len),
            stop_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            wants_logprobs=sampling.logprobs is not None,
        )

    def _malformed(self, submit: Submit) -> Refused | None:
        """Why this request can never be computed."""
        config = self._config
        if submit.request_id in self._lifecycle.requests:
            return _refused(submit, RefusalReason.INTERNAL, "This request id is already in use.")
        if not submit.token_ids or len(submit.token_ids) % 4:
            detail = "The prompt is not a list of token ids."
            return _refused(submit, RefusalReason.INTERNAL, detail)
        token_ids = np.frombuffer(submit.token_ids, dtype="<i4")
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
            detail = "The prompt holds an unknown token id."
            return _refused(submit, RefusalReason.INTERNAL, detail)
        least_output = min(1, submit.sampling.max_tokens)
        if len(token_ids) + least_output > config.max_model_len:
            return _refused(
                submit,
                RefusalReason.TOO_LONG,
                f"This model's maximum context length is {config.max_model_len} tokens. However, "
                f"your prompt has {len(token_ids)} tokens.",
            )
        return None

    def _too_many(self, submit: Submit) -> Refused | None:
        """Why this request may not wait now."""
        config, waiting = self._config, len(self._queue)
        # Rows that stand empty are as good as places in the queue.
        room = config.max_queued + config.max_running - len(self._batch.active)
        tokens = self._queue.prompt_tokens + count_tokens(submit.token_ids)
        if waiting < room and not (waiting and tokens > config.max_queued_tokens):
            return None
        return _refused(
            submit,
            RefusalReason.QUEUE_FULL,
            "Too many requests are waiting. Try again later.",
            self._pace.retry_after(waiting),
        )


def _refused(
    submit: Submit, reason: RefusalReason, detail: str, retry_after: float | None = None
) -> Refused:
    return Refused(
        request_id=submit.request_id, reason=reason, detail=detail, retry_after=retry_after
    )
