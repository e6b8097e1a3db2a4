"""Whether what a model writes under a schema obeys it, though it talks nonsense.

    python -m benchmarks.correctness.obedience CORPUS [--schemas 300] [--part K/N]

CORPUS is as for `benchmarks.engine.grammar`; schemas that are refused when strict do not count.
Each is answered once by the model, the demo model unless `--model` names another, which is asked in
a chat and shown the schema's beginning; an answer that ends by itself is judged by `jsonschema`.
Answers that `max_tokens` cuts are not, nor those given up at the end of the time; one that ends in
an error does not obey.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from tokenizers import Tokenizer

from benchmarks import results
from benchmarks.engine.grammar import part_of, records
from benchmarks.engine.grammar_subjects import WHITESPACE
from radixgrove.protocol.constraints.constraint import ConstraintError, json_schema
from radixgrove.protocol.constraints.grammar import compile_constraint
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.protocol.openai.parsing import parse_chat
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import Device, WorkerSettings
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.worker.agent import demo_model
from radixgrove.worker.engine.offline import OfflineEngine
from radixgrove.worker.engine.tokenizer import tokenizer_of
from radixgrove.worker.messages import Finish, Refused, Submit, TokenRules

QUESTION = "Give me a short example, as JSON, of this schema:\n"
_SHOWN = 800  # characters of a schema: the longest take all of a small model's context
_PROMPT_TOKENS = 1024  # at most, by far
_PROGRESS_SECONDS = 10.0


def enforced(
    corpus: Path, model_dir: Path, schemas: int, part: tuple[int, int]
) -> list[tuple[str, Any, str]]:
    """Name, schema and grammar of each k-th of the first so many that are not refused."""
    tokenizer = tokenizer_of(model_dir)
    found = []
    for record in records(corpus, (1, 1)):
        if len(found) == schemas:
            break
        text = json.dumps(record["schema"], ensure_ascii=False).encode()
        try:
            asked = json_schema(text, "schema", strict=True)
            grammar = compile_constraint(asked, tokenizer, WHITESPACE).grammar
        except ConstraintError:
            continue
        found.append((str(record.get("name", "")), record["schema"], grammar))
    number, parts = part
    return list(islice(found, number - 1, None, parts))


def questions(model_dir: Path, schemas: list[Any]) -> list[bytes]:
    """For each a chat's prompt, int32 ids."""
    model = ModelDirectory.load(model_dir)
    encoder = PromptEncoder(model.tokenizer)
    config = model.config
    limits = ModelLimits(max_model_len=config.max_position_embeddings, vocab_size=config.vocab_size)
    prompts = []
    for schema in schemas:
        content = QUESTION + json.dumps(schema, ensure_ascii=False)[:_SHOWN]
        body = msgspec.json.encode(
            {"model": model_dir.name, "messages": [{"role": "user", "content": content}]}
        )
        prompts.append(encoder.encode_chat(parse_chat(body, limits)).token_ids)
    return prompts


def answers(
    engine: OfflineEngine,
    grammars: list[str],
    prompts: list[bytes],
    sampling: SamplingParams,
    seconds: float,
) -> Iterator[tuple[int, list[int], Finish | Refused]]:
    """As rows end: the number of the grammar, its tokens, and why it ended.

    Args:
        seconds: rows that have not ended by then are given up.
    """
    for number, (grammar, prompt) in enumerate(zip(grammars, prompts, strict=True)):
        submit = Submit(
            request_id=str(number),
            frontend=0,
            token_ids=prompt,
            sampling=msgspec.structs.replace(sampling, seed=number),
            domain="public",
            rules=TokenRules(grammar=grammar),
        )
        engine.scheduler.submit(submit, time.monotonic())
    tokens: list[list[int]] = [[] for _ in grammars]
    deadline = time.monotonic() + seconds
    while engine.scheduler.has_work and time.monotonic() < deadline:
        engine.turn()
        for output in engine.scheduler.take_outputs().get(0, []):
            number = int(output.request_id)
            if isinstance(output, Refused):
                yield number, tokens[number], output
                continue
            tokens[number] += output.token_ids
            if output.finish is not None:
                yield number, tokens[number], output.finish


def mistake(schema: Any, text: str) -> str | None:
    """Why a text is no value of the schema."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return None


def outcome_of(
    finish: Finish | Refused, schema: Any, tokens: list[int], tokenizer: Tokenizer, name: str
) -> str:
    """What an answer counts as; said why, where it is not as it should be."""
    if isinstance(finish, Refused):
        print(f"{name}: after {len(tokens)} tokens: {finish.detail}", flush=True)
        return "failed"
    if finish is Finish.LENGTH:
        return "cut"
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    wrong = mistake(schema, text)
    if wrong is None:
        return "obeys"
    print(f"{name}: {wrong}: {text[:300]}", flush=True)
    return "wrong"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="K/N", help="K-th of N")
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=3600.0, help="give up what takes longer")
    parser.add_argument("--rows", type=int, default=64, help="answers at once")
    parser.add_argument("--device", default="auto", choices=[d.value for d in Device])
    parser.add_argument("--cpu-threads", type=int, help="1 where other work shares the cores")
    arguments = parser.parse_args(argv)
    model_dir = arguments.model or demo_model.ensure()
    cases = enforced(arguments.corpus, model_dir, arguments.schemas, arguments.part)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    eos_ids = ModelDirectory.load(model_dir).eos_ids
    sampling = SamplingParams(
        max_tokens=arguments.max_tokens,
        seed=0,
        temperature=arguments.temperature,
        stop_token_ids=tuple(eos_ids),
    )
    settings = WorkerSettings(
        device=Device(arguments.device),
        cpu_threads=arguments.cpu_threads,
        max_model_len=arguments.max_tokens + _PROMPT_TOKENS,
        kv_tokens=arguments.rows * (arguments.max_tokens + _PROMPT_TOKENS),
        max_running=arguments.rows,
        queue_timeout=arguments.seconds + 60.0,
    )
    counted: Counter[str] = Counter()
    reported = time.monotonic()
    with OfflineEngine(settings, model_dir) as engine:
        grammars = [grammar for _, _, grammar in cases]
        prompts = questions(model_dir, [schema for _, schema, _ in cases])
        ended = answers(engine, grammars, prompts, sampling, arguments.seconds)
        for number, tokens, finish in ended:
            name, schema, _ = cases[number]
            counted[outcome_of(finish, schema, tokens, tokenizer, name)] += 1
            if time.monotonic() > reported + _PROGRESS_SECONDS:
                reported = time.monotonic()
                print(f"of {len(cases)} so far: {dict(counted)}", file=sys.stderr, flush=True)
    counted["given up"] = len(cases) - counted.total()
    print(dict(counted))
    judged = counted["obeys"] + counted["wrong"] + counted["failed"]
    results.record(
        {
            "benchmark": "obedience",
            "workload": f"{arguments.corpus.stem}, temperature {arguments.temperature}",
            "part": "/".join(map(str, arguments.part)),
            "model": model_dir.name,
            "subject": "radixgrove",
            "metric": "obeys",
            "value": round(100 * counted["obeys"] / max(judged, 1), 2),
            "unit": "%",
            "schemas": len(cases),
            **counted,
        }
    )
    return 0 if judged == counted["obeys"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
