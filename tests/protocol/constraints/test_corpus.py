"""Two hundred small schemas, each with values that are valid and not: enforced exactly, or refused.

`schemas.jsonl` has a record a line: `name`, `schema`, `tests` (`data`, `valid`), and for a schema
that cannot be enforced `refused`, the keyword that is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from tests.grammars import byte_tokenizer

RECORDS = [
    json.loads(line)
    for line in Path(__file__).with_name("schemas.jsonl").read_text("utf-8").splitlines()
]
ENFORCED = [record for record in RECORDS if "refused" not in record]
REFUSED = [record for record in RECORDS if "refused" in record]


def name_of(record: dict[str, Any]) -> str:
    return str(record["name"])


def test_there_are_enough() -> None:
    assert len(RECORDS) >= 200
    kinds = [{test["valid"] for test in record["tests"]} for record in ENFORCED]
    assert sum(kind == {True, False} for kind in kinds) > 0.9 * len(ENFORCED)


@pytest.mark.parametrize("record", ENFORCED, ids=name_of)
def test_a_schema_is_enforced_exactly(record: dict[str, Any]) -> None:
    known = byte_tokenizer()
    asked = constraint.json_schema(json.dumps(record["schema"]).encode(), "p", strict=True)
    fresh = build_matcher(compile_constraint(asked, known, 8).grammar, known)
    validator = Draft202012Validator(record["schema"])
    for test in record["tests"]:
        data = test["data"]
        if test["valid"]:
            assert validator.is_valid(data)
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(data, ensure_ascii=False, separators=separators)
            matcher = fresh.deep_copy()
            accepted = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
            assert accepted == test["valid"], text


@pytest.mark.parametrize("record", REFUSED, ids=name_of)
def test_a_schema_is_refused_for_the_keyword(record: dict[str, Any]) -> None:
    keyword = record["refused"]
    text = json.dumps(record["schema"]).encode()
    with pytest.raises(ConstraintError, match="cannot be enforced") as caught:
        compile_constraint(constraint.json_schema(text, "p", strict=True), byte_tokenizer(), 8)
    assert f"'{keyword}'" in caught.value.reason
    lenient = compile_constraint(constraint.json_schema(text, "p"), byte_tokenizer(), 8)
    assert keyword in lenient.ignored
