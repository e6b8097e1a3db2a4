"""The page about the API says what the code does with every field of a body."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from radixgrove.protocol.endpoints import ENDPOINTS, Endpoint
from tests.checkout import ROOT
from tools.reference import updated

PAGE = ROOT / "docs" / "api.md"


def test_refused_fields_are_those_of_the_tables() -> None:
    assert updated(PAGE) == PAGE.read_text(), "run python -m tools.reference"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_every_field_that_is_read_is_on_the_page(endpoint: Endpoint[Any]) -> None:
    """What is not named there is ignored: so says the page."""
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text()))
    fields = {field.encode_name for field in msgspec.structs.fields(endpoint.body)}
    assert fields - named == set()


def test_every_endpoint_is_on_the_page() -> None:
    text = PAGE.read_text()
    for endpoint in ENDPOINTS:
        assert f"`POST {endpoint.path}`" in text
