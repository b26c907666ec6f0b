"""Generate PyTorch source code from programs.

The source is for people to read, keep and run without this package.

    pieces      lines of at most 120 columns
    names       identifiers for the names that users chose
    origins     where a function is defined
    functions   how the source refers to a function: import, copied source, or parameter
    calls       a task as a line
    statements  the calls of a task, of its parts, and of a region
    step        a program as the body of a function
    preamble    devices, streams, events
    loops       several runs in flight

The source does what the backend ``accelerator`` does: it uses the same streams, events between
them, non-blocking copies, and ``del`` where the program frees memory. Where the backend adds
nothing to calls in one thread, the source is the code that runs.

One thread issues everything, so that the source can be read from top to bottom. A CPU task
therefore delays what is issued after it; results are the same. Knows no times. Generating source
inspects the loaded modules to find the definitions of functions, and runs no user code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from textwrap import fill
from typing import Any

from autosched._lib.text import count, duration, file_name
from autosched.codegen.calls import Caller
from autosched.codegen.functions import Functions
from autosched.codegen.loops import LOOP_HELPERS, loop_parts, swaps
from autosched.codegen.names import Names
from autosched.codegen.pieces import WIDTH, Piece, bracketed, laid_out, quoted
from autosched.codegen.preamble import HELPERS, name_globals, preamble
from autosched.codegen.statements import is_region, region_text
from autosched.codegen.step import Body
from autosched.errors import MachineError, ScheduleError
from autosched.graph.files import StoredTensor
from autosched.graph.graph import Graph
from autosched.graph.task import Task
from autosched.machine.machine import Machine
from autosched.program.program import Program

__all__ = ["Code", "generate"]

_FREED = (
    "A tensor is deleted where the stream that made it is behind all that used it: "
    "its memory is free again there."
)
_RELEASED = "Function loop keeps several runs in flight. What no line deletes is deleted when its run has ended."
_USED_IN_STEP = "complex float range slice to torch".split()


class Code(str):
    """Generated source.

    ``given`` has the objects that cannot be written as source, by the keyword parameter of ``step``
    that takes them. ``inputs`` has the parameters of the graph's inputs. ``means`` has the objects
    whose source was copied, by their names in the module. ``calls`` has, by the lines of each call,
    its position in the program and the names of what it reads.
    """

    given: Mapping[str, Any]
    inputs: Mapping[str, str]
    means: Mapping[str, Any]
    calls: Mapping[int, tuple[int, tuple[str, ...]]]


def generate(
    program: Program, graph: Graph, machine: Machine, seconds: float | None = None
) -> Code:
    r"""Write a program as a module with a function ``step`` from inputs to outputs by name.

    ``seconds`` is the predicted duration of a run. The module of a loop also has a function
    ``loop`` from batches of inputs to their outputs, which keeps several runs in flight on
    accelerators. Raises ScheduleError for tasks without
    functions, and MachineError for machines whose copies have no streams.

    >>> import autosched as asc
    >>> graph = asc.Graph("twice")
    >>> graph.output(y=graph.input("x") * 2)
    >>> program = asc.schedule(graph, asc.Machine.emulated(gpus=0)).program
    >>> print("\n".join(generate(program, graph, asc.Machine.emulated(gpus=0)).splitlines()[-3:]))
        # stream cpu/compute
        mul = x * 2
        return {"y": mul}
    """
    for task in graph.tasks:
        if task.fn is None:
            raise ScheduleError(
                f"task {task.name!r} has no function: it can be planned, not written as code"
            )
    if not machine.contention and any(
        machine.device(stream.device).is_accelerator for stream in program.streams
    ):
        raise MachineError(
            "a machine without contention is for planning: copies of real devices need copy streams"
        )
    return _Writer(program, graph, machine).code(seconds)


class _Writer:
    def __init__(self, program: Program, graph: Graph, machine: Machine):
        self.program = program
        self.graph = graph
        self.machine = machine
        self.is_loop = program.in_flight > 1
        helpers = [*HELPERS, *LOOP_HELPERS] if self.is_loop else HELPERS
        names = Names(module=helpers, both=_USED_IN_STEP)
        self.functions = Functions(names)
        caller = Caller(self.functions)
        inputs = [value for value in graph.sources if value.tensor is None]
        self.inputs = {value.index: names.parameter(value.name) for value in inputs}
        self.module = name_globals(program, machine, names)
        reads = any(isinstance(task.fn, StoredTensor) for task in graph.tasks)
        self.preamble = list(preamble(program, machine, self.module, reads))
        for task in filter(is_region, graph.tasks):
            self._define(task, caller, names)
        self.tasks = {task.name: task for top in graph.tasks for task in _called(top)}
        for task in self.tasks.values():  # names in calls precede names of values
            if not isinstance(task.fn, StoredTensor):
                caller.call(task, lambda _: "_")
        constants = {
            value.index: self.functions.give(value.tensor, value.name, "")
            for value in graph.sources
            if value.tensor is not None
        }
        self.body = Body(
            program, graph, machine, self.module, caller, names, self.inputs | constants
        )

    def _define(self, task: Task, caller: Caller, names: Names) -> None:
        write = partial(region_text, task, caller=caller, names=names)
        self.functions.define(task.fn, task.name, write)

    def code(self, seconds: float | None) -> Code:
        lines = list(self.body.lines())
        parts = [
            "\n".join(self._docstring(seconds)) + "\n",
            _imports([*self.functions.imports, "import torch", *self._helpers()]),
            *self.preamble,
            *self.functions.texts,
            *self._loop(),
            "\n".join([*self._head(), *(text for text, _ in lines)]) + "\n",
        ]
        code = Code(_spaced(parts))
        code.given, code.means = dict(self.functions.given), dict(self.functions.means)
        code.inputs = {self.graph.values[index].name: name for index, name in self.inputs.items()}
        code.calls = dict(self._calls(code.count("\n"), lines))
        return code

    def _calls(
        self, last: int, lines: list[tuple[str, int]]
    ) -> Iterator[tuple[int, tuple[int, tuple[str, ...]]]]:
        number = last - sum(text.count("\n") + 1 for text, _ in lines)
        for text, position in lines:
            for _ in text.splitlines():
                number += 1
                if position >= 0:
                    yield number, (position, self.body.reads[position])

    def _helpers(self) -> Iterator[str]:
        texts = "".join([*self.preamble, *self._loop()])
        modules = "collections", "copy", "functools", "threading"
        yield from (f"import {name}" for name in modules if f"{name}." in texts)

    def _docstring(self, seconds: float | None) -> Iterator[str]:
        used = {stream.device for stream in self.program.streams}
        devices = [name for name in self.machine.names if name in used]
        about = "" if seconds is None else f", {duration(seconds)} predicted"
        where = ", ".join(devices) or "no device"
        tasks = count(len(self.graph), "task").replace(",", "")
        first = f"{self.graph.name}: {tasks} on {where}{about}. Written by autosched."
        notes = [_FREED] if self.module.streams else []
        notes += [_RELEASED] if self.module.streams and self.is_loop else []
        notes += [*self._renamed(), *self._needed()]
        yield fill('"""' + _escaped(first) + ('"""' if not notes else ""), WIDTH)
        if notes:
            yield ""
            yield from (fill(_escaped(note), WIDTH, subsequent_indent="    ") for note in notes)
            yield '"""'

    def _renamed(self) -> Iterator[str]:
        for index, name in self.inputs.items():
            own = self.graph.values[index].name
            if name != own:
                yield f"Parameter {name} is input {quoted(own)} of the graph."

    def _needed(self) -> Iterator[str]:
        for name, item in self.functions.given.items():
            user = self.functions.uses[name]
            where = file_name(self.tasks[user].source) if user else ""
            used = f", for task {user}, added at {where}" if user else ""
            yield f"Parameter {name} takes what no text can hold: {_described(item)}{used}."

    def _loop(self) -> Iterator[str]:
        if self.is_loop:
            inputs = [*self.inputs.values()]
            yield from loop_parts(
                self.module, self.program.in_flight, inputs, [*self.functions.given]
            )

    def _head(self) -> Iterator[str]:
        issues = self.is_loop and self.module.streams  # a run, which goes on when it returns
        yield "@torch.no_grad()"
        if self.module.streams and not issues:
            yield "@ordered_with_caller"
        given = [Piece("*"), *map(Piece, self.functions.given)] if self.functions.given else []
        parameters = [*map(Piece, self.inputs.values()), *given]
        name = "issue" if issues else "step"
        yield laid_out(bracketed(f"def {name}", "()", parameters), 0, 1) + ":"
        if issues:
            yield '    """Issue a run; return its outputs, and all that it leaves in memory."""'
            yield from swaps(self.module)
        else:
            yield '    """Run once; return the outputs by name."""'


def _called(task: Task) -> Iterator[Task]:
    """Yield a task, or the parts of a merged one that is no region."""
    if not task.parts or is_region(task):
        yield task
        return
    for part in task.parts:
        yield from _called(part)


def _imports(lines: list[str]) -> str:
    """Return import lines in the usual order: the standard library first."""
    ordered = sorted(set(lines), key=lambda line: (line.startswith("from"), line))
    own = [line for line in ordered if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in ordered if line not in own]
    return "\n\n".join("\n".join(group) for group in (own, others) if group) + "\n"


def _spaced(parts: list[str]) -> str:
    """Join parts: two empty lines around definitions, one between other parts."""
    text = parts[0]
    for before, part in pairwise(parts):
        heads = (other.lstrip("\n") for other in (before, part))
        defines = any(head.startswith(("class ", "def ", "@")) for head in heads)
        text += ("\n\n" if defines else "\n") + part.lstrip("\n")
    return text


def _described(item: Any) -> str:
    if hasattr(item, "dtype") and hasattr(item, "shape"):
        return f"a tensor, {str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    kind = type(item).__name__
    name = getattr(item, "__name__", None)
    return f"{kind} {name}" if isinstance(name, str) else f"an object, {kind}"


def _escaped(text: str) -> str:
    """Return text escaped for a docstring."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
