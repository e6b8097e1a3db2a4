"""How well and how fast JSON schemas are enforced, over a corpus of schemas with instances.

    python -m benchmarks.engine.grammar CORPUS [--model DIR] [--strict] [--part K/N] [--failures]
        [--subject xgrammar]

CORPUS has a record a line: `schema`, and `tests`, a list of `data` and `valid`; or it is a folder
of such records, a file each (`maskbench/data` of guidance-ai/jsonschemabench). Those without tests
do not count. A schema is *right* if every instance is accepted or not as it should be, *refused* if
it is not compiled, and *wrong* otherwise. Times are CPU time of the process, which does nothing
else: a compile of ours includes its first mask, a mask is that of one position of an instance.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.engine.grammar_subjects import (
    OTHERS,
    Child,
    Follower,
    Ours,
    RefusedError,
    Subject,
)
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.worker.agent import demo_model


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    compiles: list[float] = field(default_factory=list)  # seconds
    masks: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for counted in ("outcomes", "instances", "reasons"):
            getattr(self, counted).update(getattr(other, counted))
        for listed in ("compiles", "masks", "failures"):
            getattr(self, listed).extend(getattr(other, listed))


def records(corpus: Path, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Of those with tests each n-th, from the k-th on: `part` is (k, n)."""
    number, parts = part
    return islice(filter(_has_tests, _all_records(corpus)), number - 1, None, parts)


def _all_records(corpus: Path) -> Iterator[dict[str, Any]]:
    if corpus.is_dir():
        for path in sorted(corpus.glob("*.json")):
            yield {"name": path.stem, **json.loads(path.read_bytes())}
        return
    with corpus.open() as lines:
        yield from map(json.loads, lines)


def _has_tests(record: dict[str, Any]) -> bool:
    return bool(record.get("tests"))


def part_of(text: str) -> tuple[int, int]:
    """`2/6` as (2, 6).

    Raises:
        ValueError: it is none.
    """
    number, parts = (int(each) for each in text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return number, parts


def judge(record: dict[str, Any], subject: Subject) -> Tally:
    """Compile one schema and try its instances."""
    tally = Tally()
    name = str(record.get("name", ""))
    started = time.process_time()
    try:
        compiled = subject.compile(record["schema"])
    except RefusedError as error:
        tally.outcomes["refused"] += 1
        tally.reasons[str(error)[:100]] += 1
        tally.failures.append(f"{name}: refused: {error}")
        return tally
    tally.compiles.append(time.process_time() - started)
    right = True
    for test in record["tests"]:
        tokens = subject.tokenize(json.dumps(test["data"], ensure_ascii=False))
        accepted = follow(compiled.begin(), tokens, tally)
        if accepted != test["valid"]:
            right = False
            kind = "valid rejected" if test["valid"] else "invalid accepted"
            tally.instances[kind] += 1
            tally.failures.append(f"{name}: {kind}: {json.dumps(test['data'])[:200]}")
    tally.outcomes["right" if right else "wrong"] += 1
    if not right:
        tally.reasons.update(f"ignores {keyword}" for keyword in compiled.ignored)
    return tally


def follow(follower: Follower, tokens: list[int], tally: Tally) -> bool:
    """Whether an instance's tokens are all allowed, and may end there."""
    for token in tokens:
        started = time.process_time()
        allowed = follower.allows(token)
        tally.masks.append(time.process_time() - started)
        if not allowed or not follower.consume(token):
            return False
    return follower.may_end()


def judge_all(records: Iterator[dict[str, Any]], subject: Subject) -> Tally:
    tally = Tally()
    for record in records:
        tally.add(judge(record, subject))
    return tally


def judge_beside(records: Iterator[dict[str, Any]], child: Child, seconds: float) -> Tally:
    """In a child process, which may take so long for one schema, or end."""
    tally = Tally()
    for record in records:
        try:
            tally.add(child.run(record, seconds))
        except (TimeoutError, EOFError) as error:
            outcome = "timed out" if isinstance(error, TimeoutError) else "crashed"
            tally.outcomes[outcome] += 1
            tally.failures.append(f"{record.get('name', '')}: {outcome}")
    child.stop()
    return tally


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    if not seconds:
        return {}
    values = np.quantile(seconds, (0.5, 0.99, 0.999, 1.0)) * 1e3
    return dict(zip(("p50", "p99", "p99.9", "max"), np.round(values, 3).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument(
        "--model", type=Path, help="directory of the tokenizer's model; default: the demo model"
    )
    parser.add_argument("--strict", action="store_true", help="refuse what is not enforced")
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="of N, the K-th"
    )
    parser.add_argument("--failures", action="store_true", help="list what is not right")
    parser.add_argument(
        "--subject", choices=["ours", *OTHERS], default="ours", help="others: where installed"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="that another subject has for a schema"
    )
    arguments = parser.parse_args()
    model_dir = arguments.model or demo_model.ensure()
    asked = records(arguments.corpus, arguments.part)
    if arguments.subject == "ours":
        ours = Ours(model_dir, strict=arguments.strict)
        tally, name = judge_all(asked, ours), ours.name
    else:
        child = Child(arguments.subject, model_dir, judge)
        tally, name = judge_beside(asked, child, arguments.seconds), child.name
    total = sum(tally.outcomes.values())
    if arguments.failures:
        print("\n".join(tally.failures))
    right = round(100 * tally.outcomes["right"] / max(total, 1), 2)
    found = {
        "schemas": total,
        "vocabulary": ModelDirectory.load(model_dir).config.vocab_size,
        **tally.outcomes,
        **tally.instances,
        "compile_ms": quantiles(tally.compiles),
        "mask_ms": quantiles(tally.masks),
    }
    print(json.dumps({"right_percent": right, **found, "reasons": tally.reasons.most_common(25)}))
    results.record(
        {
            "benchmark": "grammar",
            "workload": f"{arguments.corpus.stem}, {'strict' if arguments.strict else 'lenient'}",
            "part": "/".join(map(str, arguments.part)),
            "model": model_dir.name,
            "subject": name,
            "metric": "right",
            "value": right,
            "unit": "%",
            "device": "cpu",
            **found,
        }
    )


if __name__ == "__main__":
    main()
