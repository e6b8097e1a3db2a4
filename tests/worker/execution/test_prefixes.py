"""Prefixes that rows of a decode batch have in common: which are found, and what steps get."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.worker.attention import torch as torch_backend
from radixgrove.worker.attention.base import AttentionBatch
from radixgrove.worker.execution import prefixes
from radixgrove.worker.execution.prefixes import Group, PrefixInputs, best_groups
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.plan import NewRow, StepPlan
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy


def found(rows: list[list[int]], own: int = 0) -> set[tuple[int, tuple[int, ...]]]:
    """Pages in common and rows of the best groups; each row has `own` pages of its own behind."""
    longest = max(map(len, rows)) + own
    table = np.full((len(rows), longest + 2), 7, dtype=np.int32)  # as requests before left them
    for index, pages in enumerate(rows):
        table[index, : len(pages)] = pages
        table[index, len(pages) : len(pages) + own] = 1000 * (index + 1) + np.arange(own)
    counts = np.array([len(pages) + own for pages in rows])
    groups = best_groups(table, np.arange(len(rows)), counts)
    return {(group.pages, tuple(sorted(group.rows))) for group in groups}


def test_rows_that_share_nothing_are_in_no_group() -> None:
    assert found([[1, 2], [3, 2], [4]]) == set()


def test_rows_share_what_is_the_same_from_the_first_page_on() -> None:
    assert found([[1, 2, 3], [9, 2, 3], [1, 2, 4], [9, 2]], own=2) == {(2, (0, 2)), (2, (1, 3))}


def test_pages_behind_a_row_are_not_its_own() -> None:
    """Of earlier requests in the same rows of the table, which may have had the same."""
    assert found([[1], [1]]) == {(1, (0, 1))}


def test_a_longer_prefix_of_some_beats_a_short_one_of_all() -> None:
    """One page of a template for everybody, thirty of a document for each half."""
    first, second = list(range(1, 31)), list(range(101, 131))
    rows = [[0, *first], [0, *second], [0, *first], [0, *second]]
    assert found(rows, own=1) == {(31, (0, 2)), (31, (1, 3))}


def test_a_prefix_of_all_beats_a_little_more_of_some() -> None:
    everybody = list(range(1, 31))
    rows = [[*everybody, 50], [*everybody, 50], [*everybody, 60], [*everybody]]
    assert found(rows, own=1) == {(30, (0, 1, 2, 3))}


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6))
def test_no_other_groups_save_more(rows: list[list[int]]) -> None:
    """Against every way to put rows into groups, for pages that number what comes before too."""
    numbered = [
        [int("1" + "".join(map(str, row[: i + 1]))) for i in range(len(row))] for row in rows
    ]

    def in_common(members: tuple[int, ...]) -> int:
        columns = zip(*(numbered[member] for member in members), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pages: len(set(pages)) == 1, columns))

    def most(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        first, others = left[0], left[1:]
        best = most(others)
        for count in range(1, len(others) + 1):
            for chosen in itertools.combinations(others, count):
                rest = tuple(other for other in others if other not in chosen)
                best = max(best, count * in_common((first, *chosen)) + most(rest))
        return best

    groups = found(numbered)
    assert all(in_common(members) == pages for pages, members in groups)
    assert sum(pages * (len(members) - 1) for pages, members in groups) == most(
        tuple(range(len(rows)))
    )


def test_a_group_saves_what_all_but_one_would_read() -> None:
    assert Group([3, 5, 9], 4).saved == 8


class TestInputs:
    @pytest.fixture(autouse=True)
    def _anything_is_worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefixes, "_LEAST", 1)
        monkeypatch.setattr(prefixes, "_LEAST_OF_GROUP", 1)

    def table(self, pages: list[list[int]], tokens: list[int]) -> RequestTable:
        table = RequestTable(
            max_rows=8,
            max_model_len=64,
            page_size=4,
            scratch_page=99,
            device=torch.device("cpu"),
        )
        new = [
            NewRow(
                row=row,
                token_ids=np.zeros(tokens[row], dtype="<i4").tobytes(),
                prompt_len=tokens[row],
                pages=pages[row],
                sampling=greedy(1),
            )
            for row in range(len(pages))
        ]
        table.apply(StepPlan(step_id=0, new_rows=new))
        return table

    def test_large_groups_are_cut_into_tiles(self) -> None:
        pages = [[1, 2, 10 + row] for row in range(5)] + [[3, 4]]
        inputs = PrefixInputs(self.table(pages, [9] * 5 + [5]), max_batch=8, width=2)
        assert inputs.fill([5, 0, 1, 2, 3, 4])
        tensors = inputs.tensors
        tiles = tensors.tiles[tensors.tile_lens > 0]
        assert sorted(tiles.flatten().tolist()) == [-1, 1, 2, 3, 4, 5]
        assert tensors.tile_lens.tolist() == [8, 8, 8, 0]
        assert tensors.row_lens[:6].tolist() == [0, 8, 8, 8, 8, 8]

    def test_the_page_of_the_last_token_is_a_rows_own(self) -> None:
        """Whatever the table says: its K and V are about to be written."""
        inputs = PrefixInputs(self.table([[1, 2], [1, 2]], [8, 8]), max_batch=4, width=2)
        assert inputs.fill([0, 1])
        assert inputs.tensors.row_lens[:2].tolist() == [4, 4]

    def test_little_in_common_is_not_worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefixes, "_LEAST", 9)
        inputs = PrefixInputs(self.table([[1, 2, 3], [1, 2, 4]], [9, 9]), max_batch=4, width=2)
        assert not inputs.fill([0, 1]), "8 tokens are saved"


class Grouping(torch_backend.TorchAttention):
    """Says that it reads prefixes once, and checks those that it is given."""

    prefix_tile_rows = 3
    steps: ClassVar[list[list[int]]] = []  # what each grouped step's rows had in common

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        super().plan_captured(batch, padded)
        if batch.prefixes is None or all(length == 1 for length in batch.kv_lens_host):
            return  # the latter while graphs are captured
        table, rows = batch.page_table, batch.rows.long()
        lens: list[int] = batch.prefixes.row_lens[:padded].tolist()
        for tile, tokens in zip(batch.prefixes.tiles, batch.prefixes.tile_lens, strict=True):
            members = tile[tile >= 0].long() if tokens else tile[:0].long()
            shared = table[rows[members], : int(tokens) // self.page_size]
            assert (shared == shared[:1]).all(), "a tile's rows have the same pages"
            assert (batch.kv_lens[members] > tokens).all(), "the newest token is no part of it"
            assert all(lens[member] == tokens for member in members.tolist())
        Grouping.steps.append(sorted(length for length in lens if length))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    """With graphs of 4 and 8 rows; their prefixes are worth it whatever they save."""
    monkeypatch.setattr(prefixes, "_LEAST", 1)
    monkeypatch.setattr(prefixes, "_LEAST_OF_GROUP", 1)
    monkeypatch.setattr(torch_backend, "TorchAttention", Grouping)
    tiny.save("llama", tmp_path)
    runner = cpu_runner(tmp_path)
    runner.capture([4, 8], lambda text, done: None)
    Grouping.steps.clear()
    return runner


def test_decode_steps_are_given_the_prefixes_of_their_rows(runner: Runner) -> None:
    first, second = list(range(5, 53)), list(range(60, 92))
    driver = Driver(runner)
    driver.generate([[*first, 1], [*second, 1]], greedy(2), reuse=True)
    assert Grouping.steps == []
    prompts = [[*first, 7, i] for i in range(3)] + [[*second, 9, i] for i in range(2)] + [[1, 2]]
    driver.generate(prompts, greedy(6), reuse=True)
    assert Grouping.steps == [[32, 32, 48, 48, 48]] * 5


def test_other_requests_in_the_same_rows_are_looked_at_anew(runner: Runner) -> None:
    driver, shared = Driver(runner), list(range(5, 53))
    driver.generate([[*shared, 1]], greedy(2), reuse=True)
    driver.generate([[*shared, 7, i] for i in range(4)], greedy(4), reuse=True)
    assert Grouping.steps == [[48] * 4] * 3
    driver.generate([[i] * 50 for i in range(4)], greedy(4), reuse=True)
    assert Grouping.steps == [[48] * 4] * 3, "these have nothing in common"


def test_fewer_rows_of_a_group_are_looked_at_anew(runner: Runner) -> None:
    """Beginning with the same rows: what is said of those that have ended must not be read."""
    driver, shared = Driver(runner), list(range(5, 53))
    driver.generate([[*shared, 1]], greedy(2), reuse=True)
    prompts = [[*shared, 7, i] for i in range(6)]
    driver.generate(prompts, lambda i: greedy(6 if i < 4 else 3), reuse=True)
    assert Grouping.steps == [[48] * 6] * 2 + [[48] * 4] * 3
