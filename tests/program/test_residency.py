"""Standing, held to what it says: writes of parts may come in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autosched.program.residency import Standing


@given(st.integers(0, 7).flatmap(lambda n: st.permutations(range(n))))
def test_a_value_stands_at_the_first_version_whose_write_has_not_come(order: list[int]) -> None:
    standing: Standing[str, str] = Standing()
    standing.put("x", 0, "cpu", "memory")
    stood = 0
    for i, version in enumerate(order):
        come = set(order[: i + 1])
        stands = next(at for at in range(len(order) + 1) if at not in come)
        assert standing.change("x", version, "cpu") == (stands if stands > stood else None)
        assert (standing.latest("x", "cpu"), standing.held("x", "cpu")) == (stands, "memory")
        there = [at for at in range(len(order) + 1) if standing.get("x", at, "cpu") is not None]
        assert there == (
            [stands] if stands == i + 1 else []
        )  # with all its parts only if none came early
        stood = stands
