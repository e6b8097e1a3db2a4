"""API keys: who a request is, and who gets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixgrove.protocol.openai.errors import ApiError
from radixgrove.service.auth import ApiKeys, KeyFileError, same_secret


def keys(tmp_path: Path, text: str) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return ApiKeys.load(str(path))


def test_no_key_file_means_one_local_principal() -> None:
    for header in (None, "Bearer anything", "nonsense"):
        assert ApiKeys.load(None).authenticate(header) == "local"


def test_the_key_decides_the_principal(tmp_path: Path) -> None:
    known = keys(tmp_path, "# comment\n\nalice: a-key\nalice: second\nbob:b:with:colons\n")
    assert known.authenticate("Bearer a-key") == "alice"
    assert known.authenticate("bearer second") == "alice"
    assert known.authenticate("Bearer b:with:colons") == "bob"


def test_a_byte_order_mark_is_no_part_of_the_first_principal(tmp_path: Path) -> None:
    """As editors on Windows write one, with their ends of lines."""
    for text in ("\ufeffalice: a-key\r\nbob: b-key\r\n", "\ufeff# ours\nalice: a-key\n"):
        assert keys(tmp_path, text).authenticate("Bearer a-key") == "alice"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "a-key", "Basic a-key", "Bearer é"]
)
def test_without_a_known_key_nobody_gets_in(tmp_path: Path, header: str | None) -> None:
    for known in (keys(tmp_path, "alice: a-key\n"), keys(tmp_path, "# none yet\n")):
        with pytest.raises(ApiError) as error:
            known.authenticate(header)
        assert error.value.status == 401
        assert error.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "text",
    ["alice a-key", "alice:", ": key", "a b: key", "x: k\ny: k", "public: key", "alice: \xfcber"],
)
def test_malformed_key_files_are_refused_without_showing_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeyFileError, match=rf"line \d of .*{tmp_path}/\S+ ") as error:
        keys(tmp_path, text)
    assert "key'" not in str(error.value).replace("'principal: key'", "")


def test_a_key_that_no_header_can_carry_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"line 2 .* cannot carry: use ASCII$"):
        keys(tmp_path, "bob: k\nalice: \xfcber")


def test_an_unreadable_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"absent cannot be read: No such file"):
        ApiKeys.load(str(tmp_path / "absent"))
    (tmp_path / "latin").write_bytes(b"alice: \xfc\n")
    with pytest.raises(KeyFileError, match="latin is not UTF-8"):
        ApiKeys.load(str(tmp_path / "latin"))


def test_secrets_compare_only_when_both_are_there() -> None:
    assert same_secret("x", "x")
    for given, expected in (("x", "y"), (None, "x"), ("x", None), ("", ""), (None, None)):
        assert not same_secret(given, expected)
