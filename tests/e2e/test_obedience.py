"""The demo model at a temperature at which it talks nonsense: whatever it says obeys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import Form
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.engine.tokenizer import tokenizer_of
from radixgrove.worker.messages import Finish, TokenRules
from tests.e2e.inprocess import InProcessEngine, build, settings
from tests.grammars import byte_tokenizer
from tests.protocol.constraints.test_corpus import ENFORCED
from tests.worker.execution import tiny

SHORT = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["a", "bb", 3, None]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "exclusiveMinimum": 9, "maximum": 99},
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
                },
                "required": ["v", "left"],
                "additionalProperties": False,
            },
            "leaf": {"type": "array", "prefixItems": [{"const": "leaf"}, SHORT], "items": False},
        },
    },
    {"type": "string", "format": "date"},
    {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 1000},
]
EXPRESSIONS = ["[a-f]{3}(-[0-9]{2}){2}", "(yes|no), (perhaps|never)"]


@pytest.fixture(scope="module")
def known(demo_model_dir: Path) -> LLTokenizer:
    return tokenizer_of(demo_model_dir)


@pytest.mark.slow
def test_nonsense_obeys(demo_model_dir: Path, known: LLTokenizer) -> None:
    """Beside rows that are free, among them ones with filters, biases and penalties."""
    asked = [constraint.json_schema(json.dumps(schema).encode(), "p") for schema in SCHEMAS]
    asked += [constraint.text_form(Form.REGEX, text, "p") for text in EXPRESSIONS]
    rules = [TokenRules(grammar=compile_constraint(each, known, 2).grammar) for each in asked]
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    prompt = tokenizer.encode("Say something:").ids
    worker = settings(max_running=16)
    engine = InProcessEngine(build(worker, demo_model_dir), worker, lambda: known)
    sampling = SamplingParams(
        max_tokens=64, seed=11, temperature=1.5, repetition_penalty=1.1, logit_bias={5: -100}
    )
    free = engine.generate([prompt] * 2, sampling)
    every = [None, *rules, None]
    answers = engine.generate([prompt] * len(every), sampling, rules=every)
    assert [answers[i].tokens for i in (0, -1)] == [answer.tokens for answer in free]
    texts = [tokenizer.decode(answer.tokens) for answer in answers[1:-1]]
    ended = [answer.finish is Finish.STOP for answer in answers[1:-1]]
    assert sum(ended) >= len(ended) - 2
    for text, schema, whole in zip(texts, SCHEMAS, ended, strict=False):
        if whole:
            value = json.loads(text)
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.FormatChecker()
            ).validate(value)
    for text, expression in zip(texts[len(SCHEMAS) :], EXPRESSIONS, strict=True):
        assert re.fullmatch(expression, text)
    assert engine.scheduler.grammars.live == 0


def test_random_weights_obey_every_schema_of_the_corpus(tmp_path: Path) -> None:
    """A model of 512 tokens, of which the tokenizer has 257."""
    tiny.save("llama", tmp_path)
    known = byte_tokenizer()
    schemas = [record["schema"] for record in ENFORCED]
    asked = [constraint.json_schema(json.dumps(s).encode(), "p", strict=True) for s in schemas]
    rules = [TokenRules(grammar=compile_constraint(each, known, 1).grammar) for each in asked]
    worker = settings(max_model_len=160, kv_tokens=64 * 160)
    engine = InProcessEngine(build(worker, tmp_path), worker, lambda: known)
    sampling = SamplingParams(max_tokens=120, seed=5, temperature=1.5)
    prompts = [[number % 250, 1] for number in range(len(rules))]
    answers = engine.generate(prompts, sampling, rules=rules)
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish is Finish.STOP:
            ended += 1
            value = json.loads(bytes(token for token in answer.tokens if token < 256))
            jsonschema.Draft202012Validator(schema).validate(value)
    assert ended > 0.6 * len(schemas)
    assert engine.scheduler.grammars.live == 0


def test_special_tokens_of_the_model_are_no_text(known: LLTokenizer) -> None:
    """A grammar of any text leaves the tokens that end an answer, and none of the others."""
    asked = constraint.text_form(Form.REGEX, "(.|\n)*", "p")
    matcher = build_matcher(compile_constraint(asked, known, 2).grammar, known)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    special = {token for token in range(known.vocab_size) if known.is_special_token(token)}
    assert special & set(allowed.tolist()) == set(known.eos_tokens)
