"""What it costs the CPU to issue 1,000 tasks on four streams: beside code by hand for the same program, and replayed.

Four chains of additions on 16 numbers, which exchange what they have every 25 tasks: so streams wait for each other 36
times, and 4 times more before memory goes back. Measured is how long a call takes to return, with the GPU at rest
before. ``by hand`` is ``Lanes`` of ``by_hand.py``; ``generated code`` is what ``schedule.code`` prints, run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import by_hand
import torch
from _record import Case, Promise
from _rig import Rig
from contestants import Entry, LeftOut, close, entered, raced, replaying
from torch import Tensor

import autosched as asc
from autosched.program.program import Wait

ROUNDS = 100
LANES, BLOCKS, BLOCK = 4, 10, 25
BY_HAND = 1.15  # times the code by hand
REPLAYED = 0.05  # of it: near nothing


def cases(rig: Rig) -> dict[str, Callable[[], Case]]:
    """Return the one case."""
    return {f"{LANES * BLOCKS * BLOCK} tasks issued": lambda: _case(rig)}


def _case(rig: Rig) -> Case:
    x, y = torch.rand(16, device=rig.device), torch.rand(16, device=rig.device)
    hand = by_hand.Lanes(rig, LANES, BLOCKS, BLOCK)
    makers = {
        "by hand": lambda: Entry(partial(hand, x, y)),
        "generated code": lambda: _generated(rig, x, y),
        "autosched": lambda: ours(rig, x, y),
        "autosched, replay": lambda: ours(rig, x, y, **replaying(rig)),
    }
    entries, reasons = entered(rig, makers)
    _check(entries)
    seconds = raced(rig, entries, reasons, ROUNDS, only_issue=True)
    promises = [
        Promise(f"{name} / by hand", seconds[name] / seconds["by hand"], most=most)
        for name, most in {"autosched": BY_HAND, "autosched, replay": REPLAYED}.items()
        if seconds.keys() >= {name, "by hand"}
    ]
    schedule = entries["autosched"].schedule
    assert schedule is not None
    notes = {"waits, by hand": BLOCKS * LANES, "waits, autosched": _waits(schedule)}
    notes["streams, autosched"] = len(schedule.program.streams)
    close(entries)
    return Case(seconds, promises, reasons, notes)


def lanes(gpu: str) -> asc.Graph:
    """Return the graph, its tasks in the order of the code by hand."""
    graph = asc.Graph("lanes")
    with graph.on(gpu):
        x, y = graph.inputs("x", "y")
        values = [x] * LANES
        for _ in range(BLOCKS):
            before, values = values, []
            for lane in range(LANES):
                value = torch.add(before[lane], before[(lane + 1) % LANES])
                for _ in range(BLOCK - 1):
                    value = torch.add(value, y)
                values.append(value)
    graph.output(**{f"end{lane}": value for lane, value in enumerate(values)})
    return graph


def ours(rig: Rig, x: Tensor, y: Tensor, **how: Any) -> Entry:
    """Return ours, planned for as many streams as there are lanes."""
    machine = rig.machine(1, streams=LANES)
    schedule = asc.schedule(lanes(rig.names[0]), machine, policy="single", **how)
    return Entry(partial(schedule, x=x, y=y), schedule)


def _generated(rig: Rig, x: Tensor, y: Tensor) -> Entry:
    if not rig.real:
        raise LeftOut("names devices that are not there")
    entry = ours(rig, x, y)
    assert entry.schedule is not None
    code = entry.schedule.code
    entry.schedule.close()
    module: dict[str, Any] = {}
    exec(compile(code, "schedule.code", "exec"), module)
    return Entry(partial(module["step"], x=x, y=y, **code.given))


def _check(entries: Mapping[str, Entry]) -> None:
    """Raise unless all compute the same."""
    wanted = entries["by hand"].call()
    for name, entry in entries.items():
        found = entry.call()
        ends = list(found.values()) if isinstance(found, dict) else found
        assert all(map(torch.equal, ends, wanted)), name


def _waits(schedule: asc.Schedule) -> int:
    return sum(isinstance(instruction, Wait) for instruction in schedule.program)
