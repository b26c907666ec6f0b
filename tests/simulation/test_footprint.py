"""Predicted bytes, against the tensors that a run really holds; and bytes over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES
from autosched.program.program import Copy, Run, Stream, occupied
from autosched.runtime.backends import Step
from autosched.runtime.backends.host import Host
from autosched.simulation.footprint import footprint, memory_over_time
from autosched.testing.checking import scattered
from autosched.timeline.timeline import Span, Timeline, what
from tests.strategies import graphs, inputs_for, machines


def course(schedule: asc.Schedule) -> dict[str, tuple[float, ...]]:
    return footprint(schedule.program, schedule.problem)


# ---- over time


def over_time(
    schedule: asc.Schedule, timeline: Timeline | None = None
) -> dict[str, tuple[tuple[float, float], ...]]:
    return memory_over_time(schedule.program, schedule.problem, timeline or schedule.simulate())


def test_memory_is_taken_as_a_task_starts_and_given_back_as_its_stream_comes_to_that() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    y = graph.add(torch.neg, x, name="y", on="cuda:0")
    graph.output(z=graph.add(torch.neg, y, name="z", on="cuda:0"))
    costs = asc.Costs.table({"y": 2.0, "z": 3.0}, nbytes={"x": 100.0, "y": 10.0, "z": 1.0})
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cuda:0")],
        [asc.Link("cpu", "cuda:0", bytes_per_second=100.0, latency=0.0)],
    )
    schedule = asc.schedule(graph, machine, costs=costs)
    # The copy of x from 0 to 1, y until 3, z until 6; x goes when y is done, y when z is.
    assert over_time(schedule) == {
        "cpu": ((0.0, 100.0),),
        "cuda:0": ((0.0, 0.0), (0.0, 100.0), (1.0, 110.0), (3.0, 111.0), (6.0, 101.0), (6.0, 1.0)),
    }


def turns(schedule: asc.Schedule) -> Timeline:
    """A timeline in which one task or copy follows the other, in issue order."""
    spans = []
    for i, instruction in enumerate(schedule.program):
        if isinstance(instruction, (Run, Copy)):
            spans.append(Span(*what(instruction), occupied(instruction), i, i + 1, i))
    return Timeline(tuple(spans))


@given(graphs(), machines(), st.sampled_from(list(POLICIES)))
def test_over_time_devices_end_with_what_they_hold_and_hold_no_more_where_there_is_one_order(
    graph: asc.Graph, machine: asc.Machine, policy: str
) -> None:
    schedule = asc.schedule(graph, machine, policy=policy, examples=inputs_for(graph))
    courses = course(schedule)
    for timeline in (schedule.simulate(), turns(schedule)):
        for name, points in over_time(schedule, timeline).items():
            times = [time for time, _ in points]
            assert times == sorted(times)
            assert points[0] == (0.0, courses[name][0])
            assert points[-1][1] == courses[name][-1]
            assert all(held >= 0 for _, held in points)
    for name, points in over_time(schedule, turns(schedule)).items():
        assert max(held for _, held in points) <= schedule.peak_bytes[name]
    for name, points in over_time(schedule).items():
        changes = zip(courses[name], courses[name][1:], schedule.program, strict=False)
        if (
            len({instruction.stream for before, after, instruction in changes if before != after})
            <= 1
        ):
            assert max(held for _, held in points) == schedule.peak_bytes[name]


# ---- what is really held


class Looking(Host):
    """The host backend, which looks at memory before each run and copy, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], dict[str, int]] = dict
        self.seen: list[dict[str, int]] = []

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        def step() -> None:
            self.seen.append(self.look())
            call()

        return step

    def join(self) -> None:
        self.seen.append(self.look())


def held(schedule: asc.Schedule) -> dict[str, int]:
    """The bytes of the tensors that a schedule's memory holds now, by device; those that share memory count once.

    A storage is as large as the largest tensor in it: copies on the host keep gaps between
    elements, as others do not.
    """
    memory = schedule._executor.memory
    homes = dict(memory.program.inputs)
    device = {slot: homes[name] for name, slot in memory.homes.items()}
    for i, instruction in enumerate(memory.program):
        if isinstance(instruction, Run):
            device |= {
                slot: instruction.stream.device for slot in memory.made[i] if slot is not None
            }
        elif isinstance(instruction, Copy):
            device[memory.made[i][0]] = instruction.destination  # type: ignore[index]
    storages: dict[str, dict[int, int]] = defaultdict(dict)
    for slot, name in device.items():
        tensor, base = memory.data[slot], memory.data[memory.sharing[slot][0]]
        if tensor is None or pointer(tensor) != pointer(
            base
        ):  # what is declared a view, and torch had to copy
            continue
        known = storages[name].get(pointer(tensor), 0)
        storages[name][pointer(tensor)] = max(known, tensor.nbytes)
    return {device.name: sum(storages[device.name].values()) for device in schedule.machine.devices}


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


POLICY = st.one_of(st.sampled_from(list(POLICIES)), st.integers(0, 99).map(scattered))


@given(graphs(), machines(), POLICY)
def test_what_is_predicted_is_what_a_run_holds(
    graph: asc.Graph, machine: asc.Machine, policy: str
) -> None:
    backend = Looking()
    inputs = inputs_for(graph)
    with asc.schedule(graph, machine, policy=policy, examples=inputs, backend=backend) as schedule:
        backend.look = lambda: held(schedule)
        schedule(**inputs)
        courses = course(schedule)
        moments = [
            i
            for i, instruction in enumerate(schedule.program)
            if isinstance(instruction, (Run, Copy))
        ]
        predicted = [
            {name: course[i] for name, course in courses.items()}
            for i in [*moments, len(schedule.program)]
        ]
        assert backend.seen[: len(predicted)] == predicted
