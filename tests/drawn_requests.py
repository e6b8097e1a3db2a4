"""Requests drawn from an OpenAPI document by schemathesis, and what every answer has to keep to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


def send_drawn_requests(
    url: str,
    document: dict[str, Any],
    model: str,
    *,
    check_bodies: bool = True,
    examples: int,
) -> Counter[int]:
    """Sends requests that fit the document and requests that do not, to every operation.

    Args:
        model: the id that bodies name which name any.
        check_bodies: those of answers fit the document too.
        examples: of each kind, an operation.

    Returns:
        How many answers had which status.

    Raises:
        AssertionError, FailureGroup: an answer was a 5xx, or is not what the document says.
    """
    statuses: Counter[int] = Counter()
    checks = [*_CHECKS, response_schema_conformance] if check_bodies else _CHECKS

    def check(case: Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model
        response = case.call(base_url=url, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.body:  # a path or a query takes any text
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            run = given(case=operation.as_strategy(generation_mode=mode))(check)
            settings(
                max_examples=examples,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )(run)()
    return statuses
