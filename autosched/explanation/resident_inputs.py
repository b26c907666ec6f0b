"""Suggest inputs that could stay on accelerators between runs.

Inputs that tasks write, and constants, are the same tensors in each run. Only the user knows
whether other inputs are too: they may be weights or a new batch. Advice about them states that
condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autosched._lib.text_table import amount
from autosched.errors import AutoschedError
from autosched.explanation.advice import LEAST, Remedy, fewest
from autosched.explanation.case import SMALL, Case
from autosched.explanation.words import names
from autosched.graph.graph import Value
from autosched.machine.machine import Device
from autosched.placement import home
from autosched.policies import single_on
from autosched.program.program import Copy

__all__ = ["keep"]

_FEW = 4  # devices, up to which the inputs to keep on each are listed
_SHOWN = 3  # inputs that are named

_Homes = Mapping[str, str]


def keep(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to keep on accelerators.

    Each variant is planned and simulated.
    """
    certain, possible = _staying(case)
    best = case.makespan
    for kind, some in (
        ("keep", certain),
        ("keep inputs", [*possible, *certain] if possible else []),
    ):
        for remedy in sorted(_remedies(case, kind, some), key=lambda remedy: remedy.makespan)[:1]:
            if best - remedy.makespan > LEAST * case.makespan:
                best = remedy.makespan
                yield remedy


def _staying(case: Case) -> tuple[list[Value], list[Value]]:
    """Return the sources on the host that are the same in each run, and those that may be.

    Not all of the latter can be, or each run would compute the same: the smallest is left out.
    """
    certain = list[Value]()
    possible = list[Value]()
    for value in case.graph.sources:
        if case.machine.device(home(case.graph, case.machine, value)).kind == "cpu":
            stays = case.graph.last_version(value.index) > 0 or value.tensor is not None
            (certain if stays else possible).append(value)
    return certain, _largest(case, possible)[:-1]


def _largest(case: Case, values: Sequence[Value]) -> list[Value]:
    """Return the largest values first; of ties the first input is last, since often the batch."""
    return sorted(values, key=lambda value: (-case.costs.value_nbytes(value), -value.index))


def _remedies(case: Case, kind: str, some: Sequence[Value]) -> Iterator[Remedy]:
    """Yield remedies that keep inputs: with the placement as it is, and on one accelerator."""
    called = [value.name for value in _largest(case, some)]
    used = _destinations(case, called)
    if used:
        yield _remedy(case, kind, [name for name in called if name in used], used, None)
    for device in _kinds(case) if called and len(case.graph) <= SMALL else ():
        yield _remedy(case, kind, called, dict.fromkeys(called, device), device)


def _kinds(case: Case) -> list[str]:
    """Return an accelerator of each kind, in the machine's order."""
    first: dict[Device, str] = {}
    bound = {task.device for task in case.bound}
    for name in case.machine.accelerators:
        device = case.machine.device(name)
        anonymous = replace(device, name=device.kind, physical=None)
        first.setdefault(device if name in bound else anonymous, name)
    return list(first.values())


def _destinations(case: Case, called: Sequence[str]) -> dict[str, str]:
    """Return the first accelerator to which each input is copied from its home."""
    found: dict[str, str] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and copy.value in called and not copy.overwrite:
            value = case.graph.value(copy.value)
            goes = case.machine.device(copy.destination).kind != "cpu"
            if goes and copy.source == home(case.graph, case.machine, value):
                found.setdefault(copy.value, copy.destination)
    return found


def _remedy(
    case: Case, kind: str, called: Sequence[str], homes: _Homes, device: str | None
) -> Remedy:
    """Return the effect of keeping the first few of these inputs on accelerators.

    If ``device`` is given, all tasks are placed there.
    """

    def without(moved: Sequence[str]) -> float:
        there = {name: homes[name] for name in moved}
        try:
            return (
                case.housed(there) if device is None else _gathered(case, there, device)
            ).makespan
        except AutoschedError:  # it does not fit there, or there is no link
            return math.inf

    kept, makespan = fewest(called, case.makespan, without, case.tries)
    return Remedy(kind, _words(case, kind, kept, homes), (), tuple(kept), makespan)


def _gathered(case: Case, homes: _Homes, device: str) -> Case:
    """Return the case with inputs on a device, and all tasks that may run there."""
    housed = replace(case, graph=case.graph.pinned(homes))
    return housed.placed(single_on(device)(housed.graph, case.machine, case.costs))


def _words(case: Case, kind: str, kept: Sequence[str], homes: _Homes) -> str:
    where = list(dict.fromkeys(homes[name] for name in kept))
    moved = [
        f"{names([name for name in kept if homes[name] == device])} on {device}" for device in where
    ]
    them = " and ".join(moved) if len(where) < _FEW else f"{names(kept)} where they are used"
    total = amount(sum(case.costs.value_nbytes(case.graph.value(name)) for name in kept), "B")
    shown = ", ".join(f"{name!r}: {homes[name]!r}" for name in kept[:_SHOWN])
    more = ", ..." if len(kept) > _SHOWN else ""
    one = len(kept) == 1
    if any(name in _destinations(case, kept) for name in kept):
        why = f"{'it travels' if one else 'they travel'} from the host in each run"
    else:
        why = (
            f"elsewhere than on the host {'it' if one else 'they'} would have to travel in each run"
        )
    same = f", if {'it is the same tensor' if one else 'they are the same tensors'} in each run, as weights are"
    return (
        f"keep {them} ({total}), by inputs={{{shown}{more}}}{same * (kind == 'keep inputs')}: {why}"
    )
