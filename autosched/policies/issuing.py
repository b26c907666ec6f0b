"""Issue order, as constraints: streams are in order, and copies stand right behind what makes them.

So copies that hold one stream leave in the order in which their makers are issued; what is there from the start leaves
first. Copies of one maker leave in the order in which they are first read. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from autosched.policies.cpsat import Copy, Model

__all__ = ["add_issue_order"]


def add_issue_order(model: Model) -> None:
    """Add to a model with copies that there is an order in which its tasks are issued."""
    copies: dict[int, list[Copy]] = {}
    for copy in model.copies.values():
        copies.setdefault(model.problem.data.maker[copy.datum], []).append(copy)
    tasks = range(len(model.start))
    model.position[:] = [model.cp.new_int_var(0, len(tasks) - 1, "") for _ in tasks]
    for one, other in product(copies.get(-1, []), model.copies.values()):
        if model.problem.data.maker[other.datum] >= 0:
            _behind(model, one, other, [])
    for made in copies.values():
        _add_siblings(model, made)
    _add_pairs(model, copies)


def _add_pairs(model: Model, copies: dict[int, list[Copy]]) -> None:
    """Add for each two tasks which is first, and what follows for them and their copies."""
    cp, before, position = model.cp, model.problem.before, model.position
    leaving = {maker: _leaving(model, made) for maker, made in copies.items() if maker >= 0}
    ancestors = _ancestors(before)
    for u, v in combinations(range(len(before)), 2):
        known = bool(ancestors[v] >> u & 1)
        first = model.true if known else cp.new_bool_var("")
        same = _same_device(model, u, v)
        for one, other, way in ((u, v, first), (v, u, ~first))[: 1 if known else 2]:
            cp.add(position[one] < position[other]).only_enforce_if(way)
            if not known:
                cp.add(model.end[one] <= model.start[other]).only_enforce_if(way, same)
            if one in leaving and other in leaving:
                cp.add(leaving[one][1] <= leaving[other][0]).only_enforce_if(way, same)
                for a, b in product(copies[one], copies[other]):
                    _behind(model, a, b, [way])


def _add_siblings(model: Model, copies: Sequence[Copy]) -> None:
    """Add that copies of one maker leave in the order in which they are first read."""
    needed = {copy[:2]: _first_read(model, copy) for copy in copies}
    for a, b in combinations(copies, 2):
        if not (a.device == b.device or _out(model, a, b)):
            continue
        first = model.cp.new_bool_var("")
        for one, other, way in ((a, b, first), (b, a, ~first)):
            if one.device == other.device:
                _behind(model, one, other, [way])
            if _out(model, one, other):
                model.cp.add(one.end <= other.start).only_enforce_if(one.sent, other.sent, way)
            model.cp.add(needed[one[:2]] < needed[other[:2]]).only_enforce_if(one.sent, other.sent, way)


def _out(model: Model, one: Copy, other: Copy) -> bool:
    """Return whether two copies of one maker leave by one stream."""
    return all(model.whole.always_out(copy.datum, copy.device) for copy in (one, other))


def _first_read(model: Model, copy: Copy) -> Any:
    """Return when, in the order of issue, a copy is first needed if it is sent."""
    cp, reads, most = model.cp, model.problem.reads, 1 + max(map(len, model.problem.reads))
    readers = [
        task for task, data in enumerate(reads) if copy.datum in data and copy.device in model.whole.devices[task]
    ]
    if not readers:  # it goes back in the end
        return cp.new_constant(most * len(reads) + copy.datum)
    needed = cp.new_int_var(0, most * len(reads), "")
    chosen = [cp.new_bool_var("") for _ in readers]
    cp.add_bool_or(~copy.sent, *chosen)
    for task, is_first in zip(readers, chosen, strict=True):
        moment = most * model.position[task] + reads[task].index(copy.datum)
        cp.add(needed <= moment).only_enforce_if(model.on(task, copy.device))
        cp.add(needed >= moment).only_enforce_if(is_first)
        cp.add_implication(is_first, model.on(task, copy.device))
    return needed


def _behind(model: Model, one: Copy, other: Copy, where: Sequence[Any]) -> None:
    """Add that one copy leaves behind another if they go to one device."""
    if one.device == other.device and all(model.whole.always_in(copy.datum, copy.device) for copy in (one, other)):
        model.cp.add(one.end <= other.start).only_enforce_if(one.sent, other.sent, *where)


def _leaving(model: Model, copies: Sequence[Copy]) -> tuple[Any, Any]:
    """Return when the first of these copies begins to leave, or before; and when the last is gone, or after."""
    begin, end = model.cp.new_int_var(0, model.most, ""), model.cp.new_int_var(0, model.most, "")
    for copy in copies:
        if model.whole.always_out(copy.datum, copy.device):
            model.cp.add(begin <= copy.start).only_enforce_if(copy.sent)
            model.cp.add(end >= copy.end).only_enforce_if(copy.sent)
    return begin, end


def _same_device(model: Model, u: int, v: int) -> Any:
    """Return what is true where two tasks are on one device that has one compute stream."""
    same = model.cp.new_bool_var("")
    for p, count in enumerate(model.problem.streams):
        if count == 1:
            model.cp.add_bool_or(~model.on(u, p), ~model.on(v, p), same)
    return same


def _ancestors(before: Sequence[Sequence[int]]) -> list[int]:
    """Return for each task the set, as bits, of tasks that end before it starts."""
    found: list[int] = []
    for makers in before:
        bits = 0
        for maker in makers:
            bits |= found[maker] | 1 << maker
        found.append(bits)
    return found
