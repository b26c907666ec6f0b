"""Fuse the tasks of a graph into regions that Inductor compiles.

1. Determine the tasks that can be fused, and plan the graph without fusion.
2. Form candidates: the regions of this plan's streams, and one region per device. Estimate each.
3. On a real machine, with examples: compile the regions, and measure all tasks.
4. There, run the schedules of the candidates and of the graph without fusion in turns, and take the
   fastest. Otherwise take the shortest prediction.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from autosched.coarsening.merging import merged
from autosched.costs.costs import Costs
from autosched.costs.estimate import Estimate, estimate
from autosched.fusion.candidates import by_device, by_stream, unfusable
from autosched.fusion.estimate import region_seconds
from autosched.fusion.inductor import unavailable
from autosched.fusion.race import race
from autosched.fusion.region import Region
from autosched.graph.composite import Composite
from autosched.graph.graph import Graph
from autosched.graph.task import Seconds, Task
from autosched.graph.value import Value
from autosched.machine.machine import Machine
from autosched.measurement import measure_costs
from autosched.policies import Policy
from autosched.program.program import Program
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule

__all__ = ["fuse"]

G = TypeVar("G", bound=Graph)

_LEAST_GAIN = 0.02  # of the predicted makespan, for which more than one candidate is compiled


def fuse(
    graph: G,
    machine: Machine | None = None,
    costs: Costs | None = None,
    *,
    policy: str | Policy = "auto",
    examples: Mapping[str, Any] | None = None,
    **options: Any,
) -> G:
    """Return the graph with regions of tasks fused, each compiled by Inductor into one task.

    A region has no waits inside and runs on one device. In-place writes remain in place. Results
    equal those of the fused graph's ``run_serial`` bit for bit; compared with the graph itself,
    they differ by rounding. Random operators, operators whose results have sizes that depend on
    data, and tasks that touch parts of memory are not fused: ``not_fused`` of the graph, and of its
    schedules, has the reasons by task. Python functions are traced: what they do apart from
    operators on tensors happens once.

    ``machine``, ``costs``, ``policy`` and ``options`` are those of ``schedule``. ``examples`` are
    inputs by name, by default those of the capture. With examples and a real machine, regions are
    compiled now, all tasks are measured, and the fastest of several fused graphs is returned, or
    the graph itself if none is faster; its tasks have the measured seconds. Otherwise regions are
    compiled when they are first called.

    Without Inductor, a C++ compiler or Triton, the graph is returned as it is, with a warning.

    >>> import autosched as asc, torch
    >>> graph = asc.Graph()
    >>> graph.output(y=(graph.input("x") + 1) * 2)
    >>> [task.name for task in fuse(graph, asc.Machine.emulated(gpus=1)).tasks]
    ['add+1']
    """
    machine = Machine.local() if machine is None else machine
    given = getattr(graph, "examples", None) if examples is None else examples
    if why := next(filter(None, map(unavailable, _kinds(machine))), None):
        warnings.warn(f"graph {graph.name!r} is not fused: {why}", RuntimeWarning, stacklevel=2)
        copy = merged(graph, {})
        copy.not_fused = {task.name: why for task in graph.tasks if not task.view}
        return copy
    fusion = _Fusion(graph, machine, costs, given or None, {"policy": policy, **options})
    best: G = fusion.best()
    return best


class _Candidate(NamedTuple):
    """Groups of tasks by name, and the number of threads of each CPU stream."""

    groups: Mapping[str, str]
    threads: int


class _Fusion:
    """The fusion of one graph for one machine."""

    def __init__(
        self,
        graph: Any,
        machine: Machine,
        costs: Costs | None,
        examples: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ):
        self.graph = graph
        self.machine = machine
        self.examples = examples
        self.options = options
        known = estimate(graph, examples) if examples else Estimate(Costs(), {})
        self.costs = known.costs if costs is None else costs
        # 1. The tasks that can be fused, and a plan without fusion
        self.reasons = unfusable(graph, known.unknown)
        self.plain = self._schedule(graph)

    def best(self) -> Any:
        """Return the best graph."""
        # 2. Candidates
        candidates = self._candidates()
        fused = [self._fused(candidate) for candidate in candidates]
        seconds = [self._schedule(graph).makespan for graph in fused]
        if not self._is_measurable():
            return min(zip(seconds, fused, strict=True), key=lambda pair: pair[0])[1]
        # 3. Compile and measure
        most = (1 - _LEAST_GAIN) * min(seconds[:1])
        chosen = [c for c, taken in zip(candidates, seconds, strict=True) if taken < most]
        measured = [self._measured(candidate) for candidate in (candidates[0], *chosen)]
        # 4. Run in turns
        racers = [*map(self._schedule, measured), self.plain]
        taken = race(racers, self.examples or {})
        for made in racers:
            made.close()
        graphs = [*measured, self._fused(_Candidate({}, 1))]
        return graphs[taken.index(min(taken))]

    def _schedule(self, graph: Graph) -> Schedule:
        return schedule(graph, self.machine, costs=self.costs, **self.options)

    def _candidates(self) -> list[_Candidate]:
        """Return one region per device; and regions of streams, if there are several."""

        def can_fuse(task: Task) -> bool:
            return task.name not in self.reasons

        placement = self.plain.placement
        program = self.plain.program
        found = [_Candidate(by_device(self.graph, placement, can_fuse), _threads(1))]
        groups = by_stream(self.graph, program, can_fuse)
        if set(groups.values()) != set(found[0].groups.values()):
            found.append(_Candidate(groups, _threads(_cpu_streams(program))))
        return found

    def _fused(self, candidate: _Candidate) -> Any:
        """Return a new graph with these regions, with estimated seconds."""

        def make(composite: Composite) -> tuple[Callable[..., Any], Seconds]:
            seconds = {
                device.name: region_seconds(composite, self.graph.values, self.costs, device)
                for device in self.machine.devices
            }
            return Region(composite, candidate.threads), seconds

        made = merged(self.graph, candidate.groups, make)
        made.not_fused = self.reasons
        return made

    def _is_measurable(self) -> bool:
        """Whether tasks can be run now without consequences: on examples, and on a real machine."""
        if self.machine.imagined or self.examples is None:
            return False
        return not any(_changes(self.graph, value) for value in self.graph.sources) and not any(
            isinstance(item, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))
            for task in self.graph.tasks
            for item in task.shared
        )

    def _measured(self, candidate: _Candidate) -> Any:
        """Return the fused graph with measured seconds for all tasks."""
        graph = self._fused(candidate)
        with _intra_op_threads(candidate.threads):
            found = measure_costs(graph, self.machine, self.examples, repeat=3)
        graph.builder.set_seconds(found.seconds)
        return graph


def _changes(graph: Graph, source: Value) -> bool:
    """Whether a run changes an object that the graph holds."""
    written = any(graph.last_version(member) for member in graph.members(source.index))
    return isinstance(source.tensor, torch.Generator) or (source.tensor is not None and written)


def _kinds(machine: Machine) -> list[str]:
    """Return the kinds of devices for which regions are compiled."""
    if machine.imagined:
        return ["cpu"]
    return list(dict.fromkeys(device.kind for device in machine.devices))


def _cpu_streams(program: Program) -> int:
    """Return the number of CPU streams that compute."""
    streams = [stream for stream in program.streams if stream.name.startswith("compute")]
    return sum(stream.device.startswith("cpu") for stream in streams)


def _threads(streams: int) -> int:
    """Return the share of torch's threads that each of several CPU streams has."""
    return max(1, torch.get_num_threads() // max(1, streams))


@contextlib.contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
