"""Define programs: flat lists of instructions in issue order.

A program names tasks, values, devices and streams. It holds no function, no tensor and no time. So
it can be printed, compared as text and parsed.

Rules on which every consumer relies:

1. The instructions of one stream take effect in list order.
2. A ``wait`` names an event that is recorded earlier in the list, so a program cannot deadlock.
   CUDA ignores a wait for an event that has not been recorded.
3. A ``copy`` that names a second stream (``also``) is ordered on both streams.
4. A program with ``in_flight`` > 1 is a loop: runs are numbered, each stream executes run after run,
   and run r begins when run r - ``in_flight`` has ended. Only such a program has waits for events
   of earlier runs (``ago``); where there is no such run, they have no effect. What a run leaves in
   memory, apart from inputs, constants and outputs, is released when the run ends.
5. A program may span several ranks: ``ranks`` has those of its devices. Then each event is
   recorded and waited for on one rank, and a copy between ranks names a stream of each: a send on
   the first and a receive on the second, at one position in the list. Since all ranks issue in
   list order, no rank waits for another that waits for it. The receive follows the send, and the
   send does not follow the receive, although rule 3 may hold, too: a message may be buffered.

Rule 3 is for copies between two accelerators, which occupy the copy-out stream of the source and
the copy-in stream of the destination: torch makes the current streams of both devices wait for each
other. A copy between host and accelerator occupies only the copy stream of the accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from autosched.errors import ProgramError

if TYPE_CHECKING:
    from autosched.program.arrays import Columns


class Stream(NamedTuple):
    """An in-order queue of one device: ``compute``, ``compute1``, ``copy-in`` or ``copy-out``."""

    device: str
    name: str

    def __str__(self) -> str:
        return f"{self.device}/{self.name}"


@dataclass(frozen=True, slots=True)
class Run:
    """Run a task: ``run h``."""

    stream: Stream
    task: str

    def __str__(self) -> str:
        return f"run {self.task}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a version of a value to another device: ``copy h -> cuda:1`` or ``copy x <- cpu``.

    The second form is on a stream of the destination. If both ends have copy streams, the copy
    occupies both: ``copy h -> cuda:1/copy-in``. ``overwrite`` copies back into the input of that
    name, which tasks wrote elsewhere: ``copy w@1 -> cpu overwriting``.
    """

    stream: Stream
    value: str
    version: int
    source: str
    destination: str
    also: Stream | None = None
    overwrite: bool = False

    def __str__(self) -> str:
        if self.stream.device == self.source:
            ends = f"-> {self.also or self.destination}"
        else:
            ends = f"<- {self.source}"
        return f"copy {_versioned(self.value, self.version)} {ends}" + (
            " overwriting" if self.overwrite else ""
        )


@dataclass(frozen=True, slots=True)
class Send:
    """The half of a copy between ranks that the source executes: ``send h -> cpu:1``.

    Only the part of one rank has it: see ``Program.part``.
    """

    stream: Stream
    value: str
    version: int
    destination: str

    def __str__(self) -> str:
        return f"send {_versioned(self.value, self.version)} -> {self.destination}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The half of a copy between ranks that the destination executes: ``receive h <- cpu:0``."""

    stream: Stream
    value: str
    version: int
    source: str
    overwrite: bool = False

    def __str__(self) -> str:
        flag = " overwriting" if self.overwrite else ""
        return f"receive {_versioned(self.value, self.version)} <- {self.source}{flag}"


@dataclass(frozen=True, slots=True)
class Record:
    """Record an event, after everything issued before on this stream: ``record e0``."""

    stream: Stream
    event: int

    def __str__(self) -> str:
        return f"record e{self.event}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Make later instructions of this stream wait for the event: ``wait e0``.

    In a loop, ``wait e0 of 1 run ago`` waits for the event that the run before has recorded, at
    whichever position in the list.
    """

    stream: Stream
    event: int
    ago: int = 0

    def __str__(self) -> str:
        return f"wait e{self.event}" + (f" of {_runs(self.ago)} ago" if self.ago else "")


@dataclass(frozen=True, slots=True)
class Free:
    """Free the memory of a version of a value on this stream's device: ``free h``.

    All values that share this memory are freed, too.
    """

    stream: Stream
    value: str
    version: int

    def __str__(self) -> str:
        return f"free {_versioned(self.value, self.version)}"


Instruction = Run | Copy | Send | Receive | Record | Wait | Free


@dataclass(frozen=True)
class Program:
    """Instructions in issue order, and the devices of inputs and outputs as (name, device).

    ``in_flight`` is the number of runs that may execute at the same time; above 1, the program is a
    loop. ``ranks`` has the rank of each device as (device, rank), sorted by rank; it is empty if
    there is one process.

    >>> cuda, cpu = Stream("cuda:0", "compute"), Stream("cpu", "compute")
    >>> print(Program((Run(cuda, "h"), Record(cuda, 0), Wait(cpu, 0), Run(cpu, "y"))))
    cuda:0/compute  run h
    cuda:0/compute  record e0
    cpu/compute     wait e0
    cpu/compute     run y
    """

    instructions: tuple[Instruction, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    in_flight: int = 1
    ranks: tuple[tuple[str, int], ...] = ()

    def part(self, rank: int) -> Program:
        r"""Return what one rank executes: its streams, with sends and receives for copies.

        Its inputs and outputs are those on the devices of the rank. Raises ProgramError for an
        unknown rank.

        >>> lines = ["rank 0 has cpu:0", "rank 1 has cpu:1", "input x on cpu:0"]
        >>> lines += ["cpu:0/copy-out copy x -> cpu:1/copy-in", "output y on cpu:1"]
        >>> print(Program.parse("\n".join(lines)).part(1))
        rank 1 has cpu:1
        cpu:1/copy-in  receive x <- cpu:0
        output y on cpu:1
        """
        if rank not in self._parts:
            ranks = sorted(self._parts)
            raise ProgramError(f"the program has no rank {rank!r}; its ranks are {ranks}")
        return self._parts[rank]

    @cached_property
    def _parts(self) -> dict[int, Program]:
        from autosched.program.parts import parts_of

        return parts_of(self)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams, in order of first use."""
        seen: dict[Stream, None] = {}
        for instruction in self.instructions:
            seen[instruction.stream] = None
            if type(instruction) is Copy and instruction.also is not None:
                seen[instruction.also] = None
        return tuple(seen)

    @property
    def arrows(self) -> tuple[tuple[int, int], ...]:
        """Pairs of positions (a, b): the run or copy at b waits for that at a, of the same run."""
        return self._arrows[0]

    @property
    def carried_arrows(self) -> tuple[tuple[int, int, int], ...]:
        """Triples (a, b, ago): the run or copy at b waits for that at a, of so many runs ago."""
        return self._arrows[1]

    @cached_property
    def _arrows(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
        last: dict[Stream, int] = {}  # the last run or copy of each stream
        recorded: dict[int, list[int]] = {}
        waiting: dict[Stream, list[int]] = {}
        arrows: list[tuple[int, int]] = []
        earlier: dict[Stream, list[Wait]] = {}  # waits for events of earlier runs
        carried: list[tuple[Wait, int]] = []
        for i, instruction in enumerate(self.instructions):
            match instruction:
                case Record(stream, event):
                    # Without a run or copy since a wait, that wait's producers are passed on.
                    before = [last[stream]] if stream in last else []
                    recorded[event] = [*before, *waiting.get(stream, ())]
                case Wait(stream, event, 0) if event in recorded:
                    waiting.setdefault(stream, []).extend(recorded[event])
                case Wait(stream, _, ago) if ago:
                    earlier.setdefault(stream, []).append(instruction)
                case Run() | Copy() | Send() | Receive():
                    for stream in occupied(instruction):
                        arrows += [(producer, i) for producer in waiting.pop(stream, ())]
                        carried += [(wait, i) for wait in earlier.pop(stream, ())]
                        last[stream] = i
        over_runs = ((a, i, w.ago) for w, i in carried for a in recorded.get(w.event, ()))
        return tuple(arrows), tuple(over_runs)

    @cached_property
    def columns(self) -> Columns:
        """The kinds, streams and events of the instructions as arrays of numbers."""
        from autosched.program.arrays import columns_of

        return columns_of(self)

    def __len__(self) -> int:
        return len(self.instructions)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __str__(self) -> str:
        width = max((len(str(i.stream)) for i in self.instructions), default=0)
        lines = [f"{_runs(self.in_flight)} in flight"] if self.in_flight > 1 else []
        held: dict[int, list[str]] = {}
        for device, rank in self.ranks:
            held.setdefault(rank, []).append(device)
        lines += [f"rank {rank} has {' '.join(devices)}" for rank, devices in held.items()]
        lines += [f"input {name} on {device}" for name, device in self.inputs]
        lines += [f"{i.stream!s:<{width}}  {i}" for i in self.instructions]
        lines += [f"output {name} on {device}" for name, device in self.outputs]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read the text of ``str(program)``. Raises ProgramError naming the line it cannot read.

        >>> text = "cuda:0/compute  run h"
        >>> str(Program.parse(text)) == text
        True
        """
        if not isinstance(text, str):
            raise ProgramError(f"a program is read from a string, got {text!r}")
        inputs = []
        outputs = []
        instructions = []
        in_flight = 1
        ranks: list[tuple[str, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            match words:
                case []:
                    continue
                case [count, "runs", "in", "flight"] if _COUNT.fullmatch(count):
                    in_flight = int(count)
                case ["rank", rank, "has", *devices] if _NUMBER.fullmatch(rank):
                    ranks += [(device, int(rank)) for device in devices]
                case ["input", name, "on", device]:
                    inputs.append((name, device))
                case ["output", name, "on", device]:
                    outputs.append((name, device))
                case [stream, *rest] if instruction := _parse(stream, rest):
                    instructions.append(instruction)
                case _:
                    raise ProgramError(f"line {number} is no instruction: {line!r}")
        return cls(tuple(instructions), tuple(inputs), tuple(outputs), in_flight, tuple(ranks))


def occupied(instruction: Instruction) -> tuple[Stream, ...]:
    """Return the streams that an instruction occupies: one, or two for some copies."""
    if isinstance(instruction, Copy) and instruction.also is not None:
        return instruction.stream, instruction.also
    return (instruction.stream,)


def excerpt(program: Program, at: int, law: str, what: str, other: int | None) -> str:
    """Return a message with the program around an error and the conflicting instruction."""
    instructions = program.instructions
    if not 0 <= at < len(instructions):
        return what
    width = max(len(str(i.stream)) for i in instructions)
    shown = [i for i in range(len(instructions)) if abs(i - at) <= 3 or i == other]
    lines: list[str] = []
    for before, i in zip([None, *shown], shown, strict=False):
        lines += ["    ..."] if before is not None and i != before + 1 else []
        mark = "    <-- here" if i == at else "    <-- not waited for" if i == other else ""
        lines.append(f"    {instructions[i].stream!s:<{width}}  {instructions[i]}{mark}")
    return f"{what} (law: {law})\n\n" + "\n".join(lines)


_EVENT = re.compile(r"e([0-9]{1,18})")  # Python refuses to parse numbers of thousands of digits
_NUMBER = re.compile(r"[0-9]{1,9}")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_VALUE = re.compile(r"([^@]+)(?:@([1-9][0-9]{0,17}))?")


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def _versioned(value: str, version: int) -> str:
    return f"{value}@{version}" if version else value


def _parse(where: str, words: list[str]) -> Instruction | None:
    if (stream := _parse_stream(where)) is None:
        return None
    match words:
        case ["run", task]:
            return Run(stream, task)
        case ["record", event] if number := _EVENT.fullmatch(event):
            return Record(stream, int(number[1]))
        case ["wait", event] if number := _EVENT.fullmatch(event):
            return Wait(stream, int(number[1]))
        case ["wait", event, "of", count, ("run" | "runs"), "ago"] if (
            number := _EVENT.fullmatch(event)
        ) and _COUNT.fullmatch(count):
            return Wait(stream, int(number[1]), int(count))
        case ["free", value] if found := _parse_value(value):
            return Free(stream, *found)
        case ["copy", value, ("->" | "<-") as arrow, end, *flag] if flag in ([], ["overwriting"]):
            found = _parse_value(value)
            also = _parse_stream(end)
            if found is None or (also is not None and arrow == "<-"):
                return None
            other = also.device if also is not None else end
            ends = (stream.device, other) if arrow == "->" else (other, stream.device)
            return Copy(stream, *found, *ends, also, bool(flag))
        case ["send", value, "->", end] if found := _parse_value(value):
            return Send(stream, *found, end)
        case ["receive", value, "<-", end, *flag] if flag in ([], ["overwriting"]):
            found = _parse_value(value)
            return None if found is None else Receive(stream, *found, end, bool(flag))
    return None


def _parse_stream(text: str) -> Stream | None:
    device, slash, name = text.partition("/")
    return Stream(device, name) if device and slash and name and "/" not in name else None


def _parse_value(text: str) -> tuple[str, int] | None:
    found = _VALUE.fullmatch(text)
    return (found[1], int(found[2] or 0)) if found else None
