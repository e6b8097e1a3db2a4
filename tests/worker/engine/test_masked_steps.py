"""How the loop launches steps under masks: the device is given the next forward before it waits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import zmq

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import Form
from radixgrove.protocol.constraints.grammar import compile_constraint
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.engine.links import Links
from radixgrove.worker.engine.loop import Engine
from radixgrove.worker.messages import Outputs, Submit, ToFrontend, TokenRules
from radixgrove.worker.plan import Executor, StepPlan, StepResult
from radixgrove.worker.runtime import Runtime
from tests.grammars import TEXTS, decode, encode, tokenizer
from tests.worker.engine.on_fake_executor import OPTIONS, build


class Recorded:
    """An executor that keeps its calls, by name and step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.calls: list[tuple[str, int]] = []
        self._forwarded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, plan: StepPlan) -> None:
        self.calls.append(("launch", plan.step_id))
        self._executor.launch(plan)

    def forward(self, plan: StepPlan) -> None:
        self._forwarded = plan.step_id
        self.calls.append(("forward", plan.step_id))
        self._executor.forward(plan)

    def sample(self, masked: Sequence[int] = ()) -> None:
        self.calls.append(("sample", self._forwarded))
        self._executor.sample(masked)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self.calls.append(("collect", result.step_id))
        return result


class EngineHere:
    """An engine in this process, which takes its turns when it is asked to."""

    def __init__(self, directory: Path, options: dict[str, int]) -> None:
        settings = WorkerSettings(served_model_name=["fake"], page_size=4)
        self._runtime = Runtime(directory, settings, directory)
        self._context = zmq.Context()
        self._frontend = self._context.socket(zmq.PULL)
        self._frontend.bind(self._runtime.frontend_socket(0))
        self._links = Links(self._runtime)
        executor, info = build(
            {**OPTIONS, "vocab_size": len(TEXTS), **options},
            settings,
            directory,
            lambda phase: None,
            directory,
        )
        self.executor = Recorded(executor)
        self.engine = Engine(settings, self._links, self.executor, info, tokenizer)
        self._inbox = self._context.socket(zmq.PUSH)
        self._inbox.connect(self._runtime.engine_socket())
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self.tokens: dict[str, list[int]] = {}
        self._running: set[str] = set()

    def submit(self, name: str, rules: TokenRules | None, max_tokens: int = 40) -> None:
        submit = Submit(
            request_id=name,
            frontend=0,
            token_ids=np.array(encode(name), dtype="<i4").tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, seed=3),
            domain="local",
            rules=rules,
        )
        self._running.add(name)
        self.tokens[name] = []
        self._inbox.send(msgspec.msgpack.encode(submit))

    def run(self) -> None:
        """Until every request has ended."""
        deadline = time.monotonic() + 60
        while self._running:
            assert time.monotonic() < deadline, self.executor.calls[-10:]
            self.engine._turn()
            while self._frontend.poll(0):
                message = self._decoder.decode(self._frontend.recv())
                for item in message.items if isinstance(message, Outputs) else []:
                    self.tokens[item.request_id] += item.token_ids  # type: ignore[union-attr]
                    if item.finish is not None:  # type: ignore[union-attr]
                        self._running.discard(item.request_id)

    def close(self) -> None:
        self._links.close()
        self._frontend.close(0)
        self._inbox.close(0)
        self._context.term()


@contextmanager
def engine(**options: int) -> Iterator[EngineHere]:
    with TemporaryDirectory(prefix="rg-") as name:
        here = EngineHere(Path(name), options)
        try:
            yield here
        finally:
            here.close()


def digits(count: int) -> TokenRules:
    asked = constraint.text_form(Form.REGEX, f"[0-9]{{{count}}}", "p")
    return TokenRules(grammar=compile_constraint(asked, tokenizer(), 8).grammar)


def test_a_forward_is_launched_before_the_step_before_is_waited_for() -> None:
    """The step before is collected, and its tokens followed, between forward and sample."""
    with engine(depth=2) as here:
        here.submit("ruled", digits(20))
        here.run()
        assert re.fullmatch("[0-9]{20}", decode(here.tokens["ruled"]))
        calls = here.executor.calls
        place = {call: index for index, call in enumerate(calls)}
        # Behind those that the answer is of, one was planned before its end was known.
        steps = [step for name, step in calls if name == "sample"][:20]
        assert len(steps) == 20
        assert not [call for call in calls if call[0] == "launch"]
        for before, step in pairwise(steps):
            forward, collect = place["forward", step], place["collect", before]
            assert place["sample", before] < forward < collect < place["sample", step]


def test_steps_of_free_rows_are_launched_whole() -> None:
    with engine(depth=2) as here:
        here.submit("free", None)
        here.run()
        assert {name for name, _ in here.executor.calls} == {"launch", "collect"}


def test_free_rows_beside_others_say_what_they_would() -> None:
    texts = []
    for rules in (None, digits(10)):
        with engine(depth=2) as here:
            here.submit("free", None)
            here.submit("other", rules)
            here.run()
            texts.append(here.tokens["free"])
    assert texts[0] == texts[1]
