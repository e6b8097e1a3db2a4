"""Whether tool calls obey, over questions of BFCL, against any server with OpenAI's chat API.

    python -m benchmarks.correctness.tool_calls DATA --url http://127.0.0.1:8000/v1 [--rows 50]

DATA is the folder `berkeley-function-call-leaderboard/bfcl_eval/data` of ShishirPatil/gorilla.
Every question is asked with `tool_choice: "required"`. A call *obeys* if it names one of its
question's tools and has arguments of that tool's schema; an answer that `max_tokens` cut may end in
one that does not. *Correct* are answers with the calls, and the values, that BFCL lists; where no
tool fits, none can be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks import results

CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
# BFCL's names of types.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_MOST_CALLS = 6  # of an answer whose calls are compared in every order


@dataclass(frozen=True)
class Question:
    category: str
    messages: list[Any]
    tools: list[dict[str, Any]]  # functions: name, description, parameters
    # Its calls, each the values that an argument may have, by its name; None: no tool fits.
    answer: list[dict[str, dict[str, list[Any]]]] | None


def questions(folder: Path, categories: Sequence[str], rows: int) -> Iterator[Question]:
    """So many of each category."""
    for category in categories:
        name = f"BFCL_v4_{category}.json"
        answers = folder / "possible_answer" / name
        known = {each["id"]: each["ground_truth"] for each in _lines(answers)}
        for row in islice(_lines(folder / name), rows):
            tools = [
                {**tool, "parameters": schema_of(tool["parameters"])} for tool in row["function"]
            ]
            yield Question(category, row["question"][0], tools, known.get(row["id"]))


def _lines(path: Path) -> Iterator[Any]:
    if path.exists():
        with path.open() as lines:
            yield from map(json.loads, lines)


def schema_of(parameters: Any) -> Any:
    """A JSON schema of one with BFCL's types."""
    if isinstance(parameters, list):
        return [schema_of(each) for each in parameters]
    if not isinstance(parameters, dict):
        return parameters
    schema = {key: schema_of(value) for key, value in parameters.items()}
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = TYPES.get(kind, kind)
    return schema


async def ask(client: httpx.AsyncClient, model: str, question: Question, most: int) -> Any:
    """The answer's choice."""
    body = {
        "model": model,
        "messages": question.messages,
        "tools": [{"type": "function", "function": tool} for tool in question.tools],
        "tool_choice": "required",
        "parallel_tool_calls": question.category == "parallel",
        "temperature": 0,
        "max_tokens": most,
    }
    answer = await client.post("chat/completions", json=body)
    if answer.is_error:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
    return answer.json()["choices"][0]


def obeys(call: Any, tools: list[dict[str, Any]]) -> bool:
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    schema = schemas.get(call["function"]["name"])
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(arguments)


def is_correct(calls: list[Any], wanted: list[dict[str, dict[str, list[Any]]]]) -> bool:
    """Whether the calls are those that are wanted, in any order."""
    if len(calls) != len(wanted) or len(calls) > _MOST_CALLS:
        return False
    found = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    return any(
        all(_matches(call, each) for call, each in zip(found, order, strict=True))
        for order in permutations(wanted)
    )


def _matches(call: tuple[str, Any], wanted: dict[str, dict[str, list[Any]]]) -> bool:
    ((name, values),) = wanted.items()
    called, arguments = call
    if called != name or not set(arguments) <= set(values):
        return False
    return all(
        arguments[key] in allowed if key in arguments else "" in allowed
        for key, allowed in values.items()
    )


async def run(asked: list[Question], url: str, model: str, at_once: int, most: int) -> Counter[str]:
    """Counts, by category and altogether."""
    counted: Counter[str] = Counter()
    free = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, question: Question) -> None:
        async with free:
            choice = await ask(client, model, question, most)
        calls = choice["message"].get("tool_calls") or []
        cut = choice["finish_reason"] == "length"
        whole = calls[:-1] if cut and calls and not obeys(calls[-1], question.tools) else calls
        counts = {
            "answers": 1,
            "cut": cut,
            "calls": len(whole),
            "obey": sum(obeys(call, question.tools) for call in whole),
            "without": not calls and not cut,
        }
        if question.answer is not None:
            counts |= {"judged": 1, "correct": not cut and is_correct(whole, question.answer)}
        for key, count in counts.items():
            counted[key] += count
            counted[f"{question.category} {key}"] += count

    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await asyncio.gather(*(one(client, question) for question in asked))
    return counted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1/")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--category", nargs="+", default=CATEGORIES, choices=CATEGORIES)
    parser.add_argument("--rows", type=int, default=50, help="of each category")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args(argv)
    url = arguments.url.rstrip("/") + "/"
    model = arguments.model or httpx.get(f"{url}models").json()["data"][0]["id"]
    asked = list(questions(arguments.data, arguments.category, arguments.rows))
    counted = asyncio.run(run(asked, url, model, arguments.at_once, arguments.max_tokens))
    print(json.dumps(counted, indent=1))
    share = counted["obey"] / max(counted["calls"], 1)
    results.record(
        {
            "benchmark": "tool_calls",
            "workload": f"BFCL v4 {' '.join(arguments.category)}, {len(asked)} rows, required",
            "model": model,
            "subject": "radixgrove",
            "metric": "obey",
            "value": round(100 * share, 2),
            "unit": "%",
            **dict(sorted(counted.items())),
        }
    )
    return 0 if share == 1 and not counted["without"] else 1


if __name__ == "__main__":
    sys.exit(main())
