"""Write the instructions of a program as statements on the variables of slots.

A slot is a value on a device. An in-place write leaves the next version in the same slot. A result
that nothing uses gets no slot: it is dropped immediately. Whoever writes a program, for people or for
the runtime, gives each slot a variable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from autosched._lib.allowed import is_storage
from autosched.codegen.calls import Statements
from autosched.graph.graph import Graph
from autosched.graph.task import Here, Task
from autosched.program.program import Copy, Free, Program, Receive, Record, Run, Send, Stream, Wait
from autosched.program.residency import Buffers


class Slots:
    r"""The slots of a program; number 0 is that of no value.

    >>> graph = Graph()
    >>> graph.output(y=graph.input("x") * 2)
    >>> slots = Slots(Program.parse("input x on cpu\n cpu/a run mul\n output y on cpu"), graph)
    >>> slots.homes, slots.reads, slots.made, slots.outputs_at
    ({'x': 1}, {0: [1]}, {0: [2]}, [('y', 2)])
    """

    def __init__(self, program: Program, graph: Graph):
        self.count = 1
        self.reads: dict[int, list[int]] = {}  # of each run and copy, the slots it reads
        self.made: dict[int, list[int | None]] = {}  # and fills; None for unused results
        self.freed: dict[int, list[int]] = {}
        self.sharing: dict[int, list[int]] = {}  # slots that share memory, by each of them
        self.outputs_at: list[tuple[str, int]] = []  # by the label of an output
        values = graph.values
        homes = dict(program.inputs)
        # Those of other ranks have no home in this one's part of a program.
        present = [value for value in graph.sources if value.name in homes]
        buffers = Buffers(graph, {value.index: homes[value.name] for value in present})
        # Inputs come first, so that a run can put them into their slots at once.
        given = sorted(buffers.sources.items(), key=lambda pair: values[pair[0]].tensor is not None)
        slots = {buffer: self._new() for _, buffer in given}
        self.homes = {values[index].name: slots[buffer] for index, buffer in given}
        for step in buffers.walk(program.instructions):
            for made in step.made:
                if made is not None and made not in slots:
                    slots[made] = self._new()
                    if made.base is not None:
                        self._share(slots[made], slots[made.base])
            if isinstance(step.instruction, Free):
                self.freed[step.at] = self.sharing[slots[step.reads[0]]]
            elif isinstance(step.instruction, (Run, Copy, Send, Receive)):
                self.reads[step.at] = [slots[buffer] for buffer in step.reads]
                self.made[step.at] = [None if made is None else slots[made] for made in step.made]
        for label, device in program.outputs:
            index = graph.outputs[label]
            final = buffers.find(index, graph.last_version(index), device)
            self.outputs_at.append((label, slots[final]))

    def _new(self) -> int:
        slot = self.count
        self.count += 1
        self.sharing[slot] = [slot]
        return slot

    def _share(self, slot: int, base: int) -> None:
        """Note that a slot shares memory with another."""
        self.sharing[base].append(slot)
        self.sharing[slot] = self.sharing[base]


class Writer(ABC):
    """Writes each instruction of a program; a subclass says how it spells copies, events and frees."""

    def __init__(self, program: Program, graph: Graph, slots: Slots, statements: Statements):
        self.program = program
        self.graph = graph
        self.slots = slots
        self.statements = statements

    def texts(self, i: int, names: dict[int, str]) -> Iterator[str]:
        """Yield the statements of an instruction on variables; add those of new slots to ``names``."""
        match self.program.instructions[i]:
            case Run(stream, label) if is_storage(stream.device):
                yield from self.stored(i, self.graph.task(label), names)
            case Run(stream, label):
                yield from self.run(i, self.graph.task(label), stream.device, names)
            case Copy() | Send() | Receive() as copy:
                yield from self.copy(i, copy, names)
            case Record() | Wait() as event:
                yield from self.event(event)
            case Free(stream):
                freed = [names[slot] for slot in self.slots.freed[i] if slot in names]
                yield from self.free(stream, freed)

    def run(self, i: int, task: Task, device: str, names: dict[int, str]) -> Iterator[str]:
        """Yield the statements of a task."""
        slots = self.slots
        results = [
            (use.value, slot)
            for use, slot in zip(task.outputs, slots.made[i], strict=True)
            if slot is not None
        ]
        reads = zip(task.reads, slots.reads[i], strict=True)
        given = {use.value: names[slot] for use, slot in reads}
        made = {value: names[slot] for value, slot in results if slot in names}
        used = {value for value, _ in results}
        yield from self.statements.of(
            task, given, made, used, lambda leaf: self.place(leaf, device)
        )
        names.update((slot, made[value]) for value, slot in results)

    @abstractmethod
    def place(self, leaf: Here, device: str) -> str:
        """Return the expression for the device that replaces a placeholder."""

    def stored(self, i: int, task: Task, names: dict[int, str]) -> Iterator[str]:
        """Yield how a task says what is to be read from a file; the copy from storage reads it."""
        yield from ()

    @abstractmethod
    def copy(self, i: int, copy: Copy | Send | Receive, names: dict[int, str]) -> Iterator[str]:
        """Yield the statements of a copy, or of one half."""

    def event(self, event: Record | Wait) -> Iterator[str]:
        """Yield the statements of a record or a wait."""
        yield from ()

    @abstractmethod
    def free(self, stream: Stream, names: Sequence[str]) -> Iterator[str]:
        """Yield what frees the memory of variables."""
