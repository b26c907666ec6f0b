"""The table of deliberate bugs: true (which takes minutes), and not stale."""

from __future__ import annotations

import re

import pytest

from tests.mutants import HEADER, MUTANTS, ROOT, Mutant, Outcome, mutated, row, run

each = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@pytest.mark.slow
@each
def test_every_deliberate_bug_is_caught(mutant: Mutant) -> None:
    assert run(mutant).failed == [mutant.caught_by]


@each
def test_a_bug_can_still_be_planted_and_its_test_is_there(mutant: Mutant) -> None:
    source = mutated(mutant)
    if mutant.module.endswith(".py"):
        compile(source, mutant.module, "exec")
    path, _, test = mutant.caught_by.partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_a_bug_whose_place_has_moved_is_named() -> None:
    with pytest.raises(
        AssertionError,
        match=r"mutant 'moved' .* once in tests/conftest.py, and stands there 0 times",
    ):
        mutated(Mutant("moved", "tests/conftest.py", "no such text", "", ""))


def test_the_table_in_the_readme_has_the_same_bugs_and_tests() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    lines = (ROOT / "tests" / "README.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(HEADER.splitlines()[0]) + 2
    expected = [row(mutant, Outcome([mutant.caught_by], 0)) for mutant in MUTANTS]
    assert [untimed(line) for line in lines[start : start + len(MUTANTS)]] == [
        untimed(line) for line in expected
    ]
    assert not "".join(lines[start + len(MUTANTS) :]).startswith("|")


def untimed(line: str) -> str:
    return line[: line.rindex(" | ")]
