"""Choose the devices of state that stays there between runs.

State is the inputs of a captured step that are the same tensors in each run, such as parameters.
What no task writes is kept on each device where a task reads it, so a run copies none of it: a
policy places tasks as if such state were everywhere, and this module puts it where it is read. If
several devices read it, the graph gets a further input for each but the first. Views of state are
tasks that cost nothing; they move to their readers.

State that tasks write is kept on the device that writes it last, and runs copy it to others. But
on real accelerators it is not kept: the caller may read it after each run, so it is where the
caller has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autosched.graph.effects import counts_in_memory
from autosched.graph.graph import Graph, Task, Value
from autosched.graph.including import Copying
from autosched.placement import Placement
from autosched.problem import Problem


def keepable(problem: Problem) -> tuple[str, ...]:
    """Return the state that can be kept on devices.

    It shares memory with views alone and with no output, which the caller may write, and it has no
    device yet. Tasks that count in its memory would find other elements in that of a copy. Where
    devices have memory of their own, it is not written.
    """
    graph = problem.graph
    machine = problem.machine
    state = problem.constraints.state
    state |= {value.name for value in graph.sources if value.copy_of is not None}
    if not state:
        return ()
    is_shared = machine.imagined or not machine.accelerators
    excluded = {graph.values[i].root for i in graph.outputs.values() if not machine.ranks}
    for task in graph.tasks:
        if not task.view:
            excluded.update(graph.values[use.value].root for use in task.outputs)
        if counts_in_memory(task):
            excluded.update(graph.values[use.value].root for use in task.reads)
    return tuple(
        value.name
        for value in graph.sources
        if value.name in state
        and problem.home(value) is None
        and value.index not in excluded
        and (is_shared or not graph.last_version(value.index))
    )


def keeping(problem: Problem, names: Iterable[str]) -> Problem:
    """Return the problem with this state resident, on devices that are not chosen yet.

    Further inputs for state that several devices read remain such.
    """
    copies = (value.name for value in problem.graph.sources if value.copy_of is not None)
    resident = tuple(dict.fromkeys([*names, *copies]))
    homes = problem.constraints.inputs.items()
    inputs = {name: home for name, home in homes if name not in resident}
    return problem.constrained(inputs=inputs, resident=resident)


def with_resident_state(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Return the problem with kept state on the devices that read it.

    And the placement, with views of such state where they are read.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("w"), name="y"))
    >>> machine, placement = asc.Machine.emulated(gpus=1), Placement({"y": "cuda:0"}, ("y",))
    >>> problem = keeping(Problem(graph, machine), ["w"])
    >>> with_resident_state(problem, placement)[0].constraints.inputs
    {'w': 'cuda:0'}
    """
    graph = problem.graph
    machine = problem.machine
    given = problem.constraints
    if not (given.state or given.resident):
        return problem, placement
    kept = sorted(graph.value(name).index for name in given.resident)
    device = _with_views_at_readers(problem, placement, kept)
    if device != placement.device:
        placement = replace(placement, device=device)
    readers: dict[int, dict[str, None]] = {index: {} for index in kept}
    writer: dict[int, str] = {}
    for task in graph.tasks:
        for use in task.reads:
            if use.value in kept:
                readers[use.value].setdefault(device[task.name])
        writer.update((use.value, device[task.name]) for use in task.changes)
    homes: dict[str, str] = {}
    others: dict[int, list[str]] = {}
    for index, found in readers.items():
        # The caller's own tensor is on the host, so that is where the first one is if need be.
        devices = sorted(found, key=lambda name: name != machine.host) or [machine.host]
        homes[graph.values[index].name] = writer.get(index, devices[0])
        if len(devices) > 1 and index not in writer:
            others[index] = devices[1:]
    resident = given.resident
    if others:
        graph, further = _with_copies(problem, device, others)
        homes |= further
        resident += tuple(further)
    problem = replace(problem, graph=graph)
    return problem.constrained(inputs={**given.inputs, **homes}, resident=resident), placement


def with_resident_state_as(
    problem: Problem, placement: Placement, inputs: Mapping[str, str]
) -> Problem:
    """Return the problem with state kept as in a program with these ``inputs``."""
    machine = problem.machine
    names = [
        name
        for name in keepable(problem)
        if inputs.get(name, machine.host) != machine.host
        or any(f"{name}.{device}" in inputs for device in machine.names)
    ]
    if not names or not all(task.name in placement.device for task in problem.graph.tasks):
        return problem
    return with_resident_state(keeping(problem, names), placement)[0]


def without_resident_state(problem: Problem) -> Problem:
    """Return a problem with kept state on no accelerator, for bounds on all placements."""
    given = problem.constraints
    if not given.resident:
        return problem
    inputs = {**given.inputs, **dict.fromkeys(given.resident, problem.machine.host)}
    return problem.constrained(inputs=inputs)


def within(problem: Problem, part: float) -> list[str]:
    """Return kept state that takes at most this part of the memory of each limited device.

    The devices of its state are chosen. What tasks read first comes first.
    """
    graph = problem.graph
    machine = problem.machine
    held = dict.fromkeys(machine.names, 0.0)
    sizes: dict[str, list[tuple[str, float]]] = {}
    for name in problem.constraints.resident:
        value = graph.value(name)
        device = problem.homes[value.index]
        sizes.setdefault(value.copy_of or name, []).append(
            (device, problem.costs.value_nbytes(value))
        )
    found = []
    for source, places in sizes.items():
        if all(held[p] + size <= part * machine.device(p).nbytes for p, size in places):
            found.append(source)
            for p, size in places:
                held[p] += size
    return found


def _with_views_at_readers(
    problem: Problem, placement: Placement, kept: Collection[int]
) -> dict[str, str]:
    """Return the devices of tasks; views of kept state are with the first task that reads them.

    So are views of views, since they share the same memory. Views of other state are on its device.
    """
    graph = problem.graph
    names = problem.constraints.state.union(problem.constraints.resident)
    state = {
        value.index: problem.homes[value.index]
        for value in graph.sources
        if value.name in names and not graph.last_version(value.index)
    }
    first: dict[int, Task] = {}  # by value: the view of the state from which it was made
    views: list[tuple[Task, Task]] = []
    reader: dict[int, str] = {}  # by such a view, the device
    for task in graph.tasks:
        bases = [first[use.value] for use in task.reads if use.value in first]
        root = graph.values[task.outputs[0].value].root if task.view and task.outputs else -1
        if root in state:
            views.append((task, bases[0] if bases else task))
            first.update((use.value, views[-1][1]) for use in task.outputs)
            if root not in kept:
                reader[views[-1][1].index] = state[root]
        else:
            for view in bases:
                reader.setdefault(view.index, placement.device[task.name])
    found = dict(placement.device)
    for task, view in views:
        found[task.name] = reader.get(view.index, found[view.name])
    return found


def _with_copies(
    problem: Problem, device: Mapping[str, str], others: Mapping[int, Sequence[str]]
) -> tuple[Graph, dict[str, str]]:
    """Return the graph with a further input for state on each of its ``others``, and their devices."""
    graph = problem.graph
    copying = Copying(graph)
    homes: dict[str, str] = {}
    instead: dict[str, dict[int, Value]] = {}  # what tasks read, by their device
    for index, devices in others.items():
        value = graph.values[index]
        for name in devices:
            nbytes = int(problem.costs.value_nbytes(value))
            other = copying.new.add_copy(value, name, nbytes)
            instead.setdefault(name, {})[index] = other
            homes[other.name] = name
    for task in graph.tasks:
        copying.repeat(task, instead=instead.get(device[task.name]))
    return copying.finish().snapshot(), homes
