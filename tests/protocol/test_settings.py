"""Defaults that depend on the device, and on what a group looks like."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from radixgrove.protocol.settings import RouterSettings, WorkerSettings, reveal


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_long_prompt_is_in_all_stages_of_gpus_at_once(pp: int) -> None:
    """Of 8,192 tokens: in chunks of so many, its last leaves the last stage after these many
    shares of the time that one stage of all layers takes."""
    tokens = WorkerSettings(pp=pp).step_limits(on_cpu=False).max_step_tokens
    chunks = -(-8192 // tokens)
    assert (chunks + pp - 1) / (chunks * pp) <= 0.65


def test_steps_are_as_large_as_set_and_as_the_device_likes_without_stages() -> None:
    assert WorkerSettings().step_limits(on_cpu=False).max_step_tokens == 8192
    assert WorkerSettings(pp=64).step_limits(on_cpu=False).max_step_tokens == 512
    assert WorkerSettings().step_limits(on_cpu=True).max_step_tokens == 512
    assert WorkerSettings(pp=2).step_limits(on_cpu=True).max_step_tokens == 128
    assert WorkerSettings(pp=64).step_limits(on_cpu=True).max_step_tokens == 64
    assert WorkerSettings(pp=2, max_step_tokens=64).step_limits(on_cpu=False).max_step_tokens == 64


def test_the_end_of_line_behind_a_key_is_no_part_of_it() -> None:
    """Keys travel in headers; files and Secrets often end in one."""
    given = {"internal_key": "abc\n", "management_key": " abc\r\n"}
    settings = RouterSettings.model_validate(given)
    assert reveal(settings.internal_key) == reveal(settings.management_key) == "abc"
    assert reveal(WorkerSettings.model_validate({"internal_key": "abc\n"}).internal_key) == "abc"


@pytest.mark.parametrize("key", ["", " \r\n"])
@pytest.mark.parametrize(
    "name", ["internal_key", "management_key", "previous_internal_key", "metrics_key"]
)
def test_a_key_of_blanks_is_refused_not_left_out(name: str, key: str) -> None:
    """Without a key the management port is open to all processes of the machine."""
    with pytest.raises(ValidationError, match="it is empty"):
        RouterSettings.model_validate({name: key})
    assert getattr(RouterSettings.model_validate({name: None}), name) is None


@pytest.mark.parametrize("names", [[""], ["m", " "]])
def test_a_served_name_is_one_that_requests_can_give(names: list[str]) -> None:
    with pytest.raises(ValidationError, match="has an empty name"):
        WorkerSettings(served_model_name=names)


def test_the_pool_holds_a_page_and_the_longest_request_in_whole_pages() -> None:
    with pytest.raises(ValidationError, match="less than one page of page_size 1024"):
        WorkerSettings(kv_tokens=100, page_size=1024)
    with pytest.raises(ValidationError, match="less than max_model_len 100 in whole pages"):
        WorkerSettings(kv_tokens=100, page_size=16, max_model_len=100)
    assert WorkerSettings(kv_tokens=100, page_size=16, max_model_len=96).kv_tokens == 100
