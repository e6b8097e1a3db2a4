"""Three requests that show a cluster at work: an answer, and a prefix computed only once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from radixgrove.cli.client import api_key, fetch, request

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
_TIMEOUT = 300.0
# Long enough for several pages of KV, so that the second use of it is worth finding.
_HANDBOOK = (
    "You answer questions of a botanical garden's visitors in one short sentence. The garden is "
    "open from nine in the morning until six in the evening. A ticket costs eight euros; children "
    "under twelve enter free. Dogs must wait outside. The palm house is to the left of the main "
    "gate, the rose garden behind it, the pond with the old willow at the far end of the long "
    "path. Guided tours start every full hour at the fountain. The coffee house serves cake and "
    "soup. Flowers may be looked at, smelled and painted, but never picked."
)


@dataclass(frozen=True)
class Shown:
    """What one demonstration request did."""

    question: str
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
    handbook = {"role": "system", "content": _HANDBOOK}
    shown = []
    for messages in (
        [_user(QUESTION)],
        [handbook, _user("How much is a ticket?")],
        [handbook, _user("May I bring my dog?")],
    ):
        result = _ask(url, model, messages)
        shown.append(result)
        say(
            f"  question  {result.question}\n"
            f"  answer    {result.answer}\n"
            f"            replica {result.replica}, {result.cached_tokens} of "
            f"{result.prompt_tokens} prompt tokens from its cache\n"
        )
    return shown


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _ask(url: str, model: str, messages: list[dict[str, str]]) -> Shown:
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
            question=messages[-1]["content"],
            answer=answer["choices"][0]["message"]["content"].strip(),
            replica=response.headers.get("x-radixgrove-replica", "?"),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )
