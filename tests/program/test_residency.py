"""Writes of disjoint regions may come in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autosched.program.residency import Residency


@given(st.integers(0, 7).flatmap(lambda n: st.permutations(range(n))))
def test_a_value_has_the_first_version_whose_write_has_not_come(order: list[int]) -> None:
    table: Residency[str, str] = Residency()
    table.put("x", 0, "cpu", "memory")
    before = 0
    for i, version in enumerate(order):
        come = set(order[: i + 1])
        version_now = next(at for at in range(len(order) + 1) if at not in come)
        assert table.change("x", version, "cpu") == (version_now if version_now > before else None)
        assert (table.devices("x", version_now), table.held("x", "cpu")) == (["cpu"], "memory")
        there = [at for at in range(len(order) + 1) if table.get("x", at, "cpu") is not None]
        assert there == (
            [version_now] if version_now == i + 1 else []
        )  # with all its parts only if none came early
        before = version_now
