"""How well and how fast JSON schemas are enforced, over a corpus of schemas with instances.

    python -m benchmarks.engine.grammar CORPUS [--model DIR] [--strict] [--part K/N] [--failures]

CORPUS has a record a line: `schema`, and `tests`, a list of `data` and `valid`; or it is a folder
of such records, a file each (`maskbench/data` of guidance-ai/jsonschemabench). Those without tests
do not count. A schema is *right* if every instance is accepted or not as it should be, *refused* if
it is not compiled, and *wrong* otherwise. Times are CPU time of one thread: a compile includes its
first mask, a mask is that of one position of an instance.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks import results
from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from radixgrove.worker.agent import demo_model
from radixgrove.worker.engine.tokenizer import tokenizer_of

WHITESPACE = 8


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    compiles: list[float] = field(default_factory=list)  # seconds
    masks: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


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


def judge(record: dict[str, Any], tokenizer: LLTokenizer, strict: bool, tally: Tally) -> None:
    """Compile one schema and try its instances."""
    name = str(record.get("name", ""))
    started = time.thread_time()
    try:
        text = json.dumps(record["schema"], ensure_ascii=False).encode()
        asked = constraint.json_schema(text, "schema", strict=strict)
        compiled = compile_constraint(asked, tokenizer, WHITESPACE)
    except ConstraintError as error:
        tally.outcomes["refused"] += 1
        tally.reasons[error.reason[:100]] += 1
        tally.failures.append(f"{name}: refused: {error.reason}")
        return
    tally.compiles.append(time.thread_time() - started)
    fresh = build_matcher(compiled.grammar, tokenizer)
    right = True
    for test in record["tests"]:
        accepted = follow(fresh.deep_copy(), test["data"], tokenizer, tally)
        if accepted != test["valid"]:
            right = False
            kind = "valid rejected" if test["valid"] else "invalid accepted"
            tally.instances[kind] += 1
            tally.failures.append(f"{name}: {kind}: {json.dumps(test['data'])[:200]}")
    tally.outcomes["right" if right else "wrong"] += 1
    if not right:
        tally.reasons.update(f"ignores {keyword}" for keyword in compiled.ignored)


def follow(matcher: LLMatcher, data: Any, tokenizer: LLTokenizer, tally: Tally) -> bool:
    """Whether an instance's tokens are all allowed, and may end there."""
    for token in tokenizer.tokenize_str(json.dumps(data, ensure_ascii=False)):
        started = time.thread_time()
        mask = matcher.compute_bitmask()
        tally.masks.append(time.thread_time() - started)
        if not mask[token // 8] >> token % 8 & 1 or not matcher.consume_token(token):
            return False
    return matcher.is_accepting()


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
    arguments = parser.parse_args()
    tokenizer = tokenizer_of(arguments.model or demo_model.ensure())
    tally = Tally()
    for record in records(arguments.corpus, arguments.part):
        judge(record, tokenizer, arguments.strict, tally)
    total = sum(tally.outcomes.values())
    if arguments.failures:
        print("\n".join(tally.failures))
    right = round(100 * tally.outcomes["right"] / max(total, 1), 2)
    found = {
        "schemas": total,
        "vocabulary": tokenizer.vocab_size,
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
            "model": (arguments.model or demo_model.ensure()).name,
            "subject": f"llguidance {importlib.metadata.version('llguidance')}",
            "metric": "right",
            "value": right,
            "unit": "%",
            "device": "cpu",
            **found,
        }
    )


if __name__ == "__main__":
    main()
