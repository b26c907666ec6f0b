"""Find values copied to a device again because memory is limited."""

from __future__ import annotations

from collections.abc import Iterator

from autosched._lib.text_table import amount
from autosched.explanation.case import Case
from autosched.explanation.words import count, joined, names
from autosched.graph.graph import Use
from autosched.program.program import Copy

__all__ = ["fetched", "spill_note"]


def fetched(case: Case) -> Iterator[Copy]:
    """Yield the copies that reload a value to a device where it was before."""
    seen: set[tuple[str, int, str]] = set()
    for copy in case.program:
        if isinstance(copy, Copy) and not copy.overwrite:
            place = copy.value, copy.version, copy.destination
            maker = case.graph.maker(Use(case.graph.value(copy.value).index, copy.version))
            made = None if maker is None else case.placement.device[case.graph.tasks[maker].name]
            if place in seen or made == copy.destination:
                yield copy
            seen.add(place)


def spill_note(case: Case) -> tuple[str, ...]:
    """Describe what had to be spilled and reloaded because memory is limited."""
    back = list(fetched(case))
    if not back:
        return ()
    size = sum(case.costs.value_nbytes(case.graph.value(copy.value)) for copy in back)
    where = joined(list(dict.fromkeys(copy.destination for copy in back)))
    values = names(list(dict.fromkeys(copy.value for copy in back)))
    brings = "brings" if len(back) == 1 else "bring"
    again = f"{count(len(back), 'copy')} {brings} back {values} ({amount(size, 'B')})"
    return (f"the memory of {where} does not hold all at once: {again}",)
