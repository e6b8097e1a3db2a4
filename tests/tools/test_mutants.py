"""The faults that `make mutants` draws."""

from __future__ import annotations

import ast

from tools.mutants import AREAS, draw, mutants_of
from tools.touched import ROOT

SOURCE = '''
class Queue:
    """Not a fault: a text."""

    size: int = 3

    def take(self, count: int) -> list[int]:
        """Neither is this one."""
        if count < 1 and not self.items:
            raise ValueError("1 < 2")
        logger.info("taken %d", count + 1)
        self.taken += count
        return [item for item in self.items if item >= count]
'''


def faults() -> list[tuple[str, str]]:
    return [(one.before, one.after) for one in mutants_of("area", "file.py", SOURCE)]


def test_what_is_computed_is_made_wrong() -> None:
    found = faults()
    assert ("count < 1", "count <= 1") in found
    assert ("not self.items", "bool(self.items)") in found
    assert ("count < 1 and not self.items", "(count < 1) or (not self.items)") in found
    assert ("self.taken += count", "pass") in found
    assert ("item >= count", "item > count") in found
    assert ("1", "2") in found


def test_what_people_read_is_left_alone() -> None:
    assert not [before for before, _ in faults() if "info" in before or "ValueError" in before]
    assert not [before for before, _ in faults() if before in ("3", "count + 1", "1 < 2")]


def test_every_fault_is_a_program_and_a_different_one() -> None:
    faulty = [one.apply(SOURCE) for one in mutants_of("area", "file.py", SOURCE)]
    assert len(set(faulty)) == len(faulty) > 5
    for source in faulty:
        assert source is not None
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCE))


def test_a_fault_is_found_again_though_lines_have_moved() -> None:
    (one, *_) = mutants_of("area", "file.py", SOURCE)
    assert one.apply("import this\n" + SOURCE) is not None
    assert one.apply(SOURCE.replace("def take", "def give")) is None


def test_a_seed_draws_the_same_of_every_part_of_the_product() -> None:
    drawn = draw(7, 10)
    assert drawn == draw(7, 10) != draw(8, 10)
    assert [one.area for one in drawn] == [area for area in AREAS for _ in range(2)]
    for one in drawn:
        assert one.apply((ROOT / one.file).read_text()) is not None
