"""Runs of a loop, executed one instruction after another in an order that someone chooses.

Short, slow and without threads: streams are queues, events are a set, and memory is a table of
tensors. Freed memory becomes NaN at once, and so does what a run leaves when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from autosched.graph.graph import Graph, called_with
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied
from autosched.program.residency import Buffer, Buffers, Step
from autosched.runtime.backends.host import copy_in_host_memory

Choose = Callable[[Sequence[Stream]], Stream]
Tensors = Mapping[str, torch.Tensor]


def execute(
    program: Program, graph: Graph, inputs: Sequence[Tensors], choose: Choose
) -> list[dict[str, torch.Tensor]]:
    """Execute a run for each of ``inputs``; return their outputs."""
    return _Execution(program, graph, inputs, choose).outputs()


def sources(graph: Graph, buffers: Buffers, given: Tensors) -> dict[Buffer, torch.Tensor]:
    """Return the inputs and constants by their buffers."""
    values = [graph.values[index] for index in buffers.sources]
    tensors = [given[value.name] if value.tensor is None else value.tensor for value in values]
    return dict(zip(buffers.sources.values(), tensors, strict=True))


def call(step: Step, tensors: dict[Buffer, torch.Tensor]) -> None:
    """Call the function of a task, on buffers."""
    task = step.task
    assert task is not None
    assert task.fn is not None
    given = zip(task.reads, step.reads, strict=True)
    args, kwargs = called_with(task, {use.value: tensors[buffer] for use, buffer in given})
    results = task.results(task.fn(*args, **kwargs))
    for buffer, (_, item) in zip(step.made, results, strict=True):
        if buffer is not None:
            tensors[buffer] = item


class _Execution:
    def __init__(self, program: Program, graph: Graph, inputs: Sequence[Tensors], choose: Choose):
        self.program = program
        self.graph = graph
        homes = {graph.value(name).index: device for name, device in program.inputs}
        self.buffers = Buffers(graph, homes)
        self.steps = {step.at: step for step in self.buffers.walk(program.instructions)}
        # Tensors of each run, by buffer.
        self.runs = [sources(graph, self.buffers, given) for given in inputs]
        self.lines: dict[Stream, list[int]] = {}
        for at, instruction in enumerate(program):
            for stream in occupied(instruction):
                self.lines.setdefault(stream, []).append(at)
        self.reached = dict.fromkeys(self.lines, 0)  # by stream, what it did over all runs
        self.recorded: set[tuple[int, int]] = set()
        self.left = [len(program)] * len(inputs)  # by run, the instructions that are to be executed
        while ready := [stream for stream in self.lines if self._is_ready(stream)]:
            self._go(choose(ready))
        assert not any(self.left), "a deadlock"

    def _next(self, stream: Stream) -> tuple[int, int]:
        """The run and the position of a stream's next instruction."""
        run, place = divmod(self.reached[stream], len(self.lines[stream]))
        return run, self.lines[stream][place]

    def _is_ready(self, stream: Stream) -> bool:
        run, at = self._next(stream)
        if run == len(self.runs):
            return False
        begun = run - self.program.in_flight
        if begun >= 0 and self.left[begun]:
            return False
        instruction = self.program.instructions[at]
        if isinstance(instruction, Wait):
            of = run - instruction.ago
            return of < 0 or (of, instruction.event) in self.recorded
        return all(self._next(other) == (run, at) for other in occupied(instruction))

    def _go(self, stream: Stream) -> None:
        run, at = self._next(stream)
        instruction = self.program.instructions[at]
        tensors = self.runs[run]
        match instruction:
            case Run():
                call(self.steps[at], tensors)
            case Copy():
                self._copy(self.steps[at], tensors)
            case Free():
                self._spoil(run, [self.steps[at].reads[0].block])
            case Record(_, event):
                self.recorded.add((run, event))
        for other in occupied(instruction):
            self.reached[other] += 1
        self.left[run] -= 1
        if not self.left[run]:
            self._spoil(run, list(tensors))

    def _copy(self, step: Step, tensors: dict[Buffer, torch.Tensor]) -> None:
        (source,), (target,) = step.reads, step.made
        assert target is not None
        assert isinstance(step.instruction, Copy)
        if step.instruction.overwrite:
            tensors[target].copy_(tensors[source])
        else:
            tensors[target] = copy_in_host_memory(tensors[source], None)  # with the same strides

    def _spoil(self, run: int, buffers: Iterable[Buffer]) -> None:
        """Fill memory with NaN, unless it belongs to the caller."""
        tensors = self.runs[run]
        kept = [*self._sources_of(run), *self._outputs(run).values()]
        known = {item.untyped_storage().data_ptr() for item in kept}
        for buffer in buffers:
            item = tensors[buffer]
            if item.untyped_storage().data_ptr() not in known:
                item.fill_(torch.nan)

    def _sources_of(self, run: int) -> list[torch.Tensor]:
        return [self.runs[run][buffer] for buffer in self.buffers.sources.values()]

    def _outputs(self, run: int) -> dict[str, torch.Tensor]:
        """The outputs that are there by now."""
        found = {}
        for label, device in self.program.outputs:
            index = self.graph.outputs[label]
            buffer = self.buffers.find(index, self.graph.last_version(index), device)
            if buffer in self.runs[run]:
                found[label] = self.runs[run][buffer]
        return found

    def outputs(self) -> list[dict[str, torch.Tensor]]:
        return [self._outputs(run) for run in range(len(self.runs))]
