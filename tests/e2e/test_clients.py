"""The clients that people use, against the routed endpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.checkout import ROOT
from tests.conftest import wait_until
from tests.e2e.conftest import MODEL, UpProcess, chat_body, wait_idle

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(cluster: UpProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120, max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


class Visit(BaseModel):
    """Bounded on all sides, so that nonsense ends soon."""

    city: Annotated[str, Field(max_length=12)]
    nights: Annotated[int, Field(ge=1, le=30)]
    by: Literal["train", "boat"]


def test_parsed_answers_are_what_the_schema_says(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=FRANCE,
        response_format=Visit,
        n=3,
        temperature=1.5,
        max_tokens=100,
    )
    visits = [choice.message.parsed for choice in answer.choices]
    assert all(visit is not None and 1 <= visit.nights <= 30 for visit in visits)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_stream_under_a_schema_equals_the_whole(cluster: UpProcess) -> None:
    """Through the router, with the header that names what is not enforced."""
    schema = {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 2, "maxItems": 3}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    schema["contains"] = {"const": "Paris"}
    texts = []
    for stream in (False, True):
        body = chat_body("Which cities?", response_format=asked, stream=stream)
        response = httpx.post(
            f"{cluster.url}/v1/chat/completions", json=body, timeout=120, verify=False
        )
        assert response.headers["x-radixgrove-ignored-schema-keywords"] == "contains"
        if not stream:
            texts.append(response.json()["choices"][0]["message"]["content"])
            continue
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
        texts.append("".join(delta.get("content") or "" for delta in deltas))
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) <= {"Paris", "Rome"}


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Count from one to ten, in emoji and words."}
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=40
    )
    text, usage, finishes = "", None, []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_cached_tokens_on_the_second_turn(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You answer briefly. " * 20},
        {"role": "user", "content": "Name a colour."},
    ]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    content = first.choices[0].message.content
    assert content
    messages += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": "Name another."},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens // 16 * 16 - 16
    assert cached > 0


def test_ps_shows_what_the_replicas_do(client: openai.OpenAI, cluster: UpProcess) -> None:
    prompt = "All work and no play makes Jack a dull boy. " * 30
    long = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(long))

    def shown() -> list[list[str]]:
        url = f"http://127.0.0.1:{cluster.management_port}"
        command = [sys.executable, "-m", "radixgrove.cli", "ps", "--management-url", url]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [line.split() for line in text.splitlines()[2:]]  # below the router and the heads

    def busy() -> bool:
        return any(running == "1" and kv != "0%" for _, _, _, running, _, _, kv, *_ in shown())

    wait_until(busy, what="the request and its pages in the table")
    rows = shown()
    long.close()
    assert [row[:3] for row in rows] == [[f"replica-{i}", MODEL, "ready"] for i in range(2)]
    for row in rows:
        assert all(re.fullmatch(r"\d+%|-", share) for share in row[6:10])
        assert re.fullmatch(r"\d+[smh]", row[10])
        assert row[11] == "cpu"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the best
        assert entry.logprob <= 0


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=3, temperature=1.0, seed=5, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=3, temperature=1.0, seed=5, max_tokens=12
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def test_stop_string_over_token_borders(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24, stop=["nce is P"]
    )
    assert answer.choices[0].message.content == "The capital of Fra"
    assert answer.choices[0].finish_reason == "stop"


def test_completions_echo_and_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, echo=True
    )
    assert answer.choices[0].text.startswith("One, two,")
    assert answer.choices[1].text.startswith("Red, green,")


def test_the_best_completions_are_those_with_the_highest_mean_logprob(
    client: openai.OpenAI,
) -> None:
    body: dict[str, Any] = {
        **{"model": MODEL, "prompt": ["One, two,", "Red,"], "max_tokens": 8},
        **{"seed": 3, "temperature": 1.5},
    }

    def texts(of_choices: Any) -> list[str]:
        return [choice.text for choice in of_choices]

    def mean(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    every = client.completions.create(**body, n=4, logprobs=0)
    best = client.completions.create(**body, n=2, best_of=4)
    expected = [
        *sorted(every.choices[:4], key=mean, reverse=True)[:2],
        *sorted(every.choices[4:], key=mean, reverse=True)[:2],
    ]
    assert texts(best.choices) == texts(expected)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    assert best.usage == every.usage


def test_logprobs_of_prompts_are_those_of_an_echo(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three", "max_tokens": 1}
    echoed = client.completions.create(**body, echo=True, logprobs=2).choices[0].logprobs
    asked: Any = client.completions.create(**body, extra_body={"prompt_logprobs": 2})
    entries = asked.choices[0].prompt_logprobs
    assert echoed is not None
    assert entries[0] is None
    tokens, logprobs = echoed.tokens or [], echoed.token_logprobs or []
    for entry, token, logprob in zip(entries[1:], tokens[1:], logprobs[1:], strict=False):
        own = next(each for each in entry.values() if each["decoded_token"] == token)
        assert own["logprob"] == pytest.approx(logprob, abs=1e-3)
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert all(len(entry) == 1 for entry in chat.prompt_logprobs[1:])


@pytest.mark.parametrize(
    ("changes", "status", "parameter"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"logit_bias": {"191222": -100}}, 400, "logit_bias"),
        ({"model": "no-such-model"}, 404, "model"),
    ],
)
def test_errors(
    client: openai.OpenAI, changes: dict[str, Any], status: int, parameter: str
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 4} | changes
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**arguments)
    assert raised.value.status_code == status
    assert raised.value.param == parameter


def test_context_overflow(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 6000}]
        )
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in raised.value.message


def test_langchain(cluster: UpProcess) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{cluster.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=24,
    )
    question = "What is the capital of France?"
    whole = model.invoke(question)
    assert whole.content == "The capital of France is Paris."
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(str(chunk.content) for chunk in model.stream(question)) == whole.content
    assert model.invoke(question, stop=["nce is P"]).content == "The capital of Fra"
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(question)
    tokens = [entry["token"] for entry in scored.response_metadata["logprobs"]["content"]]
    assert "".join(tokens) == whole.content
    (choices,) = model.generate([[HumanMessage(question)]], n=2).generations
    assert [choice.text for choice in choices] == [whole.content] * 2
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        model.invoke("word " * 6000)


def engine_gauges(worker: str) -> dict[str, float]:
    """What a worker's engine says of itself, five times a second."""
    names = ("running_requests", "kv_pages", "kv_free_pages", "kv_evictable_pages")
    names += ("aborted_requests_total",)
    found = dict.fromkeys(names, 0.0)
    for line in httpx.get(f"{worker}/metrics", timeout=30, verify=False).text.splitlines():
        name, _, value = line.removeprefix("radixgrove_engine_").rpartition(" ")
        if name in found:
            found[name] = float(value)
    assert found["kv_pages"] > 0
    return found


def held_pages(worker: str) -> float:
    gauges = engine_gauges(worker)
    return gauges["kv_pages"] - gauges["kv_free_pages"] - gauges["kv_evictable_pages"]


def test_disconnect_frees_the_replica(cluster: UpProcess) -> None:
    """Closed after the first bytes: both the router and the worker let go at once."""
    wait_idle(cluster)
    workers = [entry["url"] for entry in cluster.replicas().values()]

    def aborted() -> float:
        return sum(engine_gauges(url)["aborted_requests_total"] for url in workers)

    before = aborted()
    body = chat_body("Write a very long story.", max_tokens=1500, stream=True, ignore_eos=True)
    with httpx.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=60, verify=False
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        wait_until(lambda: any(held_pages(url) > 0 for url in workers), what="pages in use")
    wait_until(
        lambda: all(
            engine_gauges(url)["running_requests"] == 0 and held_pages(url) == 0 for url in workers
        ),
        what="the end of the request and of its hold on pages",
    )
    wait_until(lambda: aborted() == before + 1, what="that it was ended, and did not end by itself")


def test_request_id_travels(cluster: UpProcess) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=chat_body("Hi", max_tokens=2),
        headers={"x-request-id": "from-the-client-1"},
        timeout=60,
        verify=False,
    )
    assert answer.headers["x-request-id"] == "from-the-client-1"
    assert answer.status_code == 200


def test_the_terminal_tells_of_the_cluster_and_the_files_of_requests(cluster: UpProcess) -> None:
    headers = {"x-request-id": "kept-in-a-file"}
    body = chat_body("What is the capital of France?", max_tokens=2)
    httpx.post(
        f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=120, verify=False
    )

    def written() -> bool:
        files = [cluster.log_dir / f"{part}.log" for part in ("router", "replica-0", "replica-1")]
        return sum("kept-in-a-file" in file.read_text() for file in files) >= 2

    wait_until(written, what="the request in the router's and a replica's file")
    shown = cluster.log.read_text()
    assert "radixgrove.access" not in shown
    assert "kept-in-a-file" not in shown
    assert str(cluster.log_dir) in shown
    for said in ("replica-1 is ready", "the router is ready", "start: loading"):
        assert said in shown
    assert len([line for line in shown.splitlines() if line.strip()]) < 80


# ---- what README says to type --------------------------------------------------------------------

README = (ROOT / "README.md").read_text()
# Commands that take minutes, or a machine of their own, and the file that runs them.
ELSEWHERE = {
    "make run": ".ci/run",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make demo-cluster": "tests/cluster/test_demo.py",
    "make bench": "tests/docs/test_commands.py",
    "radixgrove up --model /path/to/a/hugging-face-directory": "tests/e2e/conftest.py",
}
# Lint, tests and drills over again: only that make knows what to run.
TOO_LONG = ("make check", "make test-drills")


def typed_in_readme() -> list[str]:
    fences = re.DOTALL | re.MULTILINE
    blocks = re.findall(r"^```\n(.*?)^```$", README, fences)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", README, flags=fences))
    lines = "\n".join([*blocks, *spans]).splitlines()
    commands = [line.partition(" # ")[0].replace(".venv/bin/", "").strip() for line in lines]
    return [line for line in commands if re.match(r"(make|radixgrove) [a-z]|undrain$", line)]


def test_every_command_of_the_readme_runs(cluster: UpProcess) -> None:
    commands = typed_in_readme()
    assert {*ELSEWHERE, *TOO_LONG, "undrain"} < {*commands}
    addresses = {
        "RADIXGROVE_URL": cluster.url,
        "RADIXGROVE_MANAGEMENT_URL": f"http://127.0.0.1:{cluster.management_port}",
    }
    for command in commands:
        if command in ELSEWHERE:
            words = command.split()
            assert words[1] in (ROOT / ELSEWHERE[command]).read_text(), command
            continue
        if command in TOO_LONG:
            arguments = ["make", "--dry-run", "--directory", str(ROOT), command.split()[1]]
        else:
            line = "undrain replica-0" if command == "undrain" else command.partition(" ")[2]
            arguments = [sys.executable, "-m", "radixgrove.cli", *line.split()]
        ended = subprocess.run(
            arguments, env={**os.environ, **addresses}, input="What is the capital of France?\n",
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        assert ended.stdout.strip(), command
    wait_until(
        lambda: all(entry["state"] == "ready" for entry in cluster.replicas().values()),
        what="the replica that was taken out of service is back",
    )


def test_the_readmes_program_prints_the_answer(cluster: UpProcess) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8000/v1" in program
    program = program.replace("http://127.0.0.1:8000", cluster.url)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Paris" in ended.stdout, ended.stderr
