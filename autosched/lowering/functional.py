"""Insert copies and find hazards of functional graphs over arrays.

In a functional graph, one without in-place writes, each value is made once, in memory of its own,
and never written again. So a value on a device (a *place*: value * devices + device) is one block,
which comes from one run or copy, and its readers come after that. ``copies`` and ``hazards``
compute the same step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from autosched.graph.flow import flow, rows_of, starts
from autosched.graph.graph import Graph, Task
from autosched.lowering.copies import check_outputs, copy_streams
from autosched.lowering.hazards import Hazards
from autosched.machine.machine import Machine
from autosched.placement import Send, home
from autosched.program.program import Copy, Run, Stream

__all__ = ["insert_functional", "is_functional"]

Ints = NDArray[np.int64]


def is_functional(graph: Graph, machine: Machine) -> bool:
    """Return whether a graph is functional, and all devices are linked to each other."""
    return graph.is_plain and all(
        machine.link(a, b) for a in machine.names for b in machine.names if a != b
    )


def insert_functional(
    graph: Graph,
    machine: Machine,
    tasks: Sequence[Task],
    runs: Sequence[Run],
    outputs: Mapping[str, str],
    sends: Sequence[Send] = (),
) -> tuple[list[Run | Copy], dict[str, str], Hazards]:
    """Return the runs with copies inserted, the final device of each output, and the hazards.

    ``tasks`` are those of the runs, in the same order; ``sends`` are hints for the positions of
    copies.
    """
    check_outputs(graph, machine, outputs)
    lines = _Lines(graph, machine, tasks, runs)
    places = {
        label: outputs.get(label, machine.names[lines.first[index]])
        for label, index in graph.outputs.items()
    }
    lines.bring(places, sends)
    return lines.instructions, places, lines.hazards(places)


class _Lines:
    """The positions of runs and copies, and the maker and users of each place.

    Devices are numbers.
    """

    def __init__(self, graph: Graph, machine: Machine, tasks: Sequence[Task], runs: Sequence[Run]):
        self.graph, self.machine, self.runs, self.flow = graph, machine, runs, flow(graph)
        self.count = len(machine.names)
        self.number = {name: p for p, name in enumerate(machine.names)}
        self.task = np.array([task.index for task in tasks], np.int64)
        self.run = np.empty_like(self.task)  # by task, its run
        self.run[self.task] = np.arange(len(runs))
        self.device = np.array([self.number[run.stream.device] for run in runs], np.int64)[self.run]
        self.maker = np.full(len(graph.values), -1)  # by value, the run that makes it
        self.first = np.zeros_like(self.maker)  # by value, the device where it is made
        self.reader, maker, self.follower = map(
            rows_of, (self.flow.reads_at, self.flow.makes_at, self.flow.after_at)
        )
        self.maker[self.flow.makes], self.first[self.flow.makes] = (
            self.run[maker],
            self.device[maker],
        )
        for value in graph.sources:
            self.first[value.index] = self.number[home(graph, machine, value)]

    def _wanted(self, outputs: Mapping[str, str]) -> Ints:
        """Return the places of outputs."""
        found = [
            self.graph.outputs[label] * self.count + self.number[name]
            for label, name in outputs.items()
        ]
        return np.array(found, np.int64)

    def bring(self, outputs: Mapping[str, str], sends: Sequence[Send]) -> None:
        """Copy each value once to each device on which it is read or is an output."""
        asked = np.argsort(self.run[self.reader], kind="stable")
        reads = self.flow.reads[asked] * self.count + self.device[self.reader[asked]]
        places = np.concatenate([reads, self._wanted(outputs)])
        by = np.concatenate(
            [self.run[self.reader[asked]], np.full(len(outputs), len(self.runs) - 1)]
        )
        away = self.first[places // self.count] != places % self.count
        _, once = np.unique(places[away], return_index=True)
        once.sort()
        self.copies = places[away][once]
        before = by[away][once] - 1
        slot, rank = self._slots(sends)
        slot = np.maximum(
            self.maker[self.copies // self.count], np.minimum(slot[self.copies], before)
        )
        order = np.lexsort((rank[self.copies], slot))
        self.copied = np.empty_like(slot)  # the position of each copy
        self.copied[order] = slot[order] + 1 + np.arange(len(slot))
        self.ran = np.arange(len(self.runs)) + np.searchsorted(
            slot[order], np.arange(len(self.runs))
        )  # the position of each run
        lines = np.empty(len(self.runs) + len(slot), object)
        lines[self.ran], lines[self.copied] = self.runs, self._made()
        self.instructions: list[Run | Copy] = lines.tolist()

    def _slots(self, sends: Sequence[Send]) -> tuple[Ints, Ints]:
        """Return for each place the run after which its copy goes, and its rank there."""
        slot, rank = np.full((2, len(self.maker) * self.count), -1)
        value = (
            {value.name: value.index * self.count for value in self.graph.values} if sends else {}
        )
        position = {run.task: i for i, run in enumerate(self.runs)} if sends else {}
        known = [
            (value[name] + self.number[device], position[before])
            for name, version, device, before in sends
            if not version
        ]
        found = np.array(known, np.int64).reshape(-1, 2)
        slot[found[:, 0]], rank[found[:, 0]] = found[:, 1] - 1, np.arange(len(found))
        return slot, rank

    def _made(self) -> list[Copy]:
        """Return the copies, in the order of the requests."""
        names = self.machine.names
        values = self.graph.values
        value, target = (number.tolist() for number in np.divmod(self.copies, self.count))
        source = self.first[value].tolist()
        ends = [(names[q], names[p]) for q, p in zip(source, target, strict=True)]
        streams = cache(partial(copy_streams, self.machine))
        lone = not self.machine.contention
        return [
            Copy(own, values[v].name, 0, q, p, also)
            for k, (v, (q, p)) in enumerate(zip(value, ends, strict=True))
            for own, also in [streams(q, p, k if lone else 0)]
        ]

    def hazards(self, outputs: Mapping[str, str]) -> Hazards:
        """Return the hazards and the blocks to be freed, which ``outputs`` are not."""
        flown = self.flow
        count = self.count
        total = len(self.instructions)
        done = self.ran[self.run]  # the position of each task
        source = self.copies // count * count + self.first[self.copies // count]
        used = np.concatenate([flown.reads * count + self.device[self.reader], source])
        users = np.concatenate([done[self.reader], self.copied])
        made = np.full(len(self.maker) * count, -1)
        made[flown.makes * count + self.first[flown.makes]] = self.ran[self.maker[flown.makes]]
        made[self.copies] = self.copied
        before = np.concatenate([made[used], done[flown.after]])
        pairs = np.concatenate([users, done[self.follower]]) * total + before
        behind, before = np.divmod(np.unique(pairs[before >= 0]), total)
        made[self._wanted(outputs)] = -1
        return self._with_blocks((starts(behind, total), before), made, used, users)

    def _with_blocks(
        self, after: tuple[Ints, Ints], made: Ints, used: Ints, users: Ints
    ) -> Hazards:
        """Return the hazards with a block for each place whose maker is not -1."""
        places = (made >= 0).nonzero()[0]
        total = len(self.instructions)
        values = self.graph.values
        places = places[np.argsort(made[places], kind="stable")]
        number = np.full(len(made), -1)
        number[places] = np.arange(len(places))
        keys = np.concatenate(
            [number[used] * total + users, np.arange(len(places)) * total + made[places]]
        )
        block, user = np.divmod(np.sort(keys[keys >= 0]), total)
        known: dict[Stream, int] = {}
        stream = np.array(
            [known.setdefault(line.stream, len(known)) for line in self.instructions], np.int64
        )[user]
        by_stream = np.argsort(block * len(known) + stream, kind="stable")
        new = np.diff(block[by_stream] * len(known) + stream[by_stream], prepend=-1) != 0
        first = by_stream[new]
        last = by_stream[np.append(new[1:], True)[: len(new)]]
        last = last[np.argsort(first)]
        names = [values[value].name for value in (places // self.count).tolist()]
        owners = self._owners(places, made, block, user)
        return Hazards(
            *after, names, [0] * len(names), owners, starts(block[last], len(places)), user[last]
        )

    def _owners(self, places: Ints, made: Ints, block: Ints, user: Ints) -> list[Stream]:
        """Return the stream that frees each block: its maker's, or its first user's there."""
        lines = self.instructions
        names = self.machine.names
        owners = [_owner(lines[i]) for i in made[places].tolist()]
        if None not in owners:
            return owners  # type: ignore[return-value]
        devices = [names[p] for p in (places % self.count).tolist()]
        for b, i in zip(block.tolist(), user.tolist(), strict=True):
            if owners[b] is None and lines[i].stream.device == devices[b]:
                owners[b] = lines[i].stream
        return [
            owner or Stream(name, "compute") for owner, name in zip(owners, devices, strict=True)
        ]


def _owner(line: Run | Copy) -> Stream | None:
    """Return the stream that allocates the result of an instruction, if it is one of its own."""
    if isinstance(line, Run):
        return line.stream
    return line.also or (line.stream if line.stream.device == line.destination else None)
