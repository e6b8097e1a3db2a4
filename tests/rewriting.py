"""Rewrites the assertions of test files before processes of tests begin.

pytest does so as it imports them, and keeps the result. In a fresh checkout every process would do
it for itself, at the same time as the others; this takes as long as their common imports do.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_all(files: Iterable[Path], config: pytest.Config) -> None:
    """Keep the code of each where pytest looks for it, but where that is there already."""
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        kept = kept_code(file)
        if rewrite._read_pyc(file, kept) is not None:
            continue
        try:
            digest, code = rewrite._rewrite_test(file, config)
        except SyntaxError:
            continue  # whichever process imports it will say so
        if rewrite.try_makedirs(kept.parent):
            rewrite._write_pyc(state, code, digest, kept)


def kept_code(file: Path) -> Path:
    """Where pytest keeps the code of a test file."""
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
