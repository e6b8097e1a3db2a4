"""Three requests that show a cluster at work: an answer, and a prefix computed only once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from radixgrove.cli.client import api_key, fetch, request

QUESTION = "What is the capital of France?"
_TIMEOUT = 300.0
# Long enough for several pages of KV, so that the second use of it is worth finding.
_GUIDE = (
    "You are the guide of a geography museum for children and grown-ups. Visitors ask you about "
    "countries, their capitals, their rivers and their mountains. Answer every question in one "
    "short and friendly sentence. Name the place that the visitor asks about, and do not add "
    "anything else. If a visitor greets you, greet back. If you do not know an answer, say that "
    "you do not know it. The museum shows a large globe, maps of all continents, and a model of "
    "the Alps."
)


@dataclass(frozen=True)
class Shown:
    """What one demonstration request did."""

    question: str
    expected: str  # what a right answer contains
    answer: str
    replica: str
    prompt_tokens: int
    cached_tokens: int


def demonstrate(url: str, say: Callable[[str], object]) -> list[Shown]:
    """Ask three questions, the last two behind the same long text; report each by `say`.

    Raises:
        ClickException: a request failed.
    """
    model = str(fetch(url, "GET", "/v1/models", key=api_key())["data"][0]["id"])
    guide = [{"role": "system", "content": _GUIDE}]
    shown = []
    for before, question, expected in (
        ([], QUESTION, "Paris"),
        (guide, "What is the capital of Italy?", "Rome"),
        (guide, "What is the capital of Germany?", "Berlin"),
    ):
        result = _ask(url, model, before, question, expected)
        shown.append(result)
        say(
            f"  question  {result.question}\n"
            f"  answer    {result.answer}\n"
            f"            replica {result.replica}, {result.cached_tokens} of "
            f"{result.prompt_tokens} prompt tokens from its cache\n"
        )
    return shown


def _ask(url: str, model: str, before: list[dict[str, str]], question: str, expected: str) -> Shown:
    messages = [*before, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 48}
    with request(
        url,
        "POST",
        "/v1/chat/completions",
        body=body,
        key=api_key(),
        timeout=_TIMEOUT,
        headers={"x-radixgrove-debug": "1"},
    ) as response:
        answer = json.loads(response.read())
        usage = answer["usage"]
        return Shown(
            question=question,
            expected=expected,
            answer=answer["choices"][0]["message"]["content"].strip(),
            replica=response.headers.get("x-radixgrove-replica", "?"),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )
