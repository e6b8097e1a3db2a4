"""The page about the API says what the code does with every field of a body."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from radixgrove.protocol.endpoints import ENDPOINTS, Endpoint
from radixgrove.protocol.openai.bodies import IGNORED
from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.settings import SchedulePolicy
from tests.checkout import ROOT
from tools.reference import settings, updated

PAGE = ROOT / "docs" / "api.md"


def test_refused_and_ignored_fields_are_those_of_the_tables() -> None:
    assert updated(PAGE) == PAGE.read_text(), "run python -m tools.reference"


def test_the_reference_has_the_values_of_settings_that_have_a_few() -> None:
    reference = settings()
    assert "Values: `lru`, `lfu`, `fifo`, `priority`. |" in reference
    assert all(f"`{policy}`" in reference for policy in SchedulePolicy)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_every_field_that_is_read_is_on_the_page(endpoint: Endpoint[Any]) -> None:
    """What is not named there is ignored: so says the page."""
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text()))
    fields = {field.encode_name for field in msgspec.structs.fields(endpoint.body)}
    assert fields - named == set()


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_ignored_fields_change_nothing(endpoint: Endpoint[Any]) -> None:
    limits = ModelLimits(max_model_len=1000, vocab_size=100)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    least = {"model": "m", "seed": 1, "stream": True, "stream_options": {}, **prompt}
    plain = endpoint.parse(msgspec.json.encode(least), limits)
    for name in IGNORED:
        parent, _, option = name.rpartition(".")
        asking: dict[str, Any] = {option: {"some": "thing"}}
        body = least | ({parent: asking} if parent else asking)
        assert endpoint.parse(msgspec.json.encode(body), limits) == plain, name


def test_every_endpoint_is_on_the_page() -> None:
    text = PAGE.read_text()
    for endpoint in ENDPOINTS:
        assert f"`POST {endpoint.path}`" in text
