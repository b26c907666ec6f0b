"""Suggest inputs that could stay on accelerators between runs.

Inputs that tasks write, and constants, are the same tensors in each run. Only the user knows
whether other inputs are too: they may be weights or a new batch. Advice about them states that
condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autosched._lib.text import amount, name_list
from autosched.errors import AutoschedError
from autosched.explanation.advice import LEAST, Remedy, fewest
from autosched.explanation.case import SMALL, Case
from autosched.explanation.placements import promised
from autosched.graph.graph import Value
from autosched.machine.machine import Device
from autosched.placement import home
from autosched.policies import single_on
from autosched.program.program import Copy

__all__ = ["keep_inputs"]

_FEW = 4  # devices, up to which the inputs to keep on each are listed
_SHOWN = 3  # inputs that are named

_Homes = Mapping[str, str]


def keep_inputs(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to keep on accelerators.

    Each variant is planned and simulated.
    """
    certain, possible = _constant_sources(case)
    best = case.makespan
    both = [*possible, *certain] if possible else []
    for kind, values in (("keep", certain), ("keep inputs", both)):
        remedies = _remedies(case, kind, values)
        remedy = min(remedies, key=lambda remedy: remedy.makespan, default=None)
        if remedy is not None and best - remedy.makespan > LEAST * case.makespan:
            best = remedy.makespan
            yield remedy


def _constant_sources(case: Case) -> tuple[list[Value], list[Value]]:
    """Return the host sources that stay the same in each run, or may.

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
    """Return the largest values first; of ties the first input, often the batch, is last."""
    return sorted(values, key=lambda value: (-case.costs.value_nbytes(value), -value.index))


def _remedies(case: Case, kind: str, values: Sequence[Value]) -> Iterator[Remedy]:
    """Yield remedies that keep inputs, placed as before or on one accelerator."""
    names = [value.name for value in _largest(case, values)]
    used = _destinations(case, names)
    if used:
        yield _remedy(case, kind, [name for name in names if name in used], used, None)
    for device in _accelerator_kinds(case) if names and len(case.graph) <= SMALL else ():
        yield _remedy(case, kind, names, dict.fromkeys(names, device), device)


def _accelerator_kinds(case: Case) -> list[str]:
    """Return an accelerator of each kind, in the machine's order."""
    first: dict[Device, str] = {}
    bound = {task.device for task in case.bound}
    for name in case.machine.accelerators:
        device = case.machine.device(name)
        anonymous = replace(device, name=device.kind, physical=None)
        first.setdefault(device if name in bound else anonymous, name)
    return list(first.values())


def _destinations(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the first accelerator to which each input is copied from its home."""
    found: dict[str, str] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and copy.value in names and not copy.overwrite:
            value = case.graph.value(copy.value)
            goes = case.machine.device(copy.destination).kind != "cpu"
            if goes and copy.source == home(case.graph, case.machine, value):
                found.setdefault(copy.value, copy.destination)
    return found


def _remedy(
    case: Case, kind: str, names: Sequence[str], homes: _Homes, device: str | None
) -> Remedy:
    """Return the effect of keeping the first few of these inputs on accelerators.

    If ``device`` is given, all tasks are placed there.
    """

    def kept(moved: Sequence[str]) -> Case:
        graph = case.graph.pinned({name: homes[name] for name in moved})
        placement = case.placement
        if device is not None:
            placement = single_on(device)(graph, case.machine, case.costs)
        return replace(case, graph=graph).placed(placement)

    def makespan_with(moved: Sequence[str]) -> float:
        try:
            return kept(moved).makespan
        except AutoschedError:  # it does not fit there, or there is no link
            return math.inf

    inputs, makespan = fewest(names, case.makespan, makespan_with, case.tries)
    if device is None and makespan < (1 - LEAST) * case.makespan:
        makespan = promised(kept(inputs))
    return Remedy(kind, _words(case, kind, inputs, homes), (), tuple(inputs), makespan)


def _words(case: Case, kind: str, inputs: Sequence[str], homes: _Homes) -> str:
    devices = list(dict.fromkeys(homes[name] for name in inputs))
    if len(devices) < _FEW:
        groups = ([name for name in inputs if homes[name] == device] for device in devices)
        pairs = zip(groups, devices, strict=True)
        what = " and ".join(f"{name_list(group)} on {device}" for group, device in pairs)
    else:
        what = f"{name_list(inputs)} where they are used"
    size = amount(sum(case.costs.value_nbytes(case.graph.value(name)) for name in inputs), "B")
    shown = ", ".join(f"{name!r}: {homes[name]!r}" for name in inputs[:_SHOWN])
    more = ", ..." if len(inputs) > _SHOWN else ""
    one = len(inputs) == 1
    if _destinations(case, inputs):
        why = f"{'it travels' if one else 'they travel'} from the host in each run"
    else:
        it = "it" if one else "they"
        why = f"elsewhere than on the host {it} would have to travel in each run"
    same = "it is the same tensor" if one else "they are the same tensors"
    condition = f", if {same} in each run, as weights are" if kind == "keep inputs" else ""
    return f"keep {what} ({size}), by inputs={{{shown}{more}}}{condition}: {why}"
