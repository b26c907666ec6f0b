"""Memory as a hard limit: what fits stays as it is, what does not is made to fit, or refused with the reason."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosched as asc
from autosched.costs.costs import Costs
from autosched.errors import MemoryLimitError
from autosched.frontends import capture
from autosched.graph.graph import Graph
from autosched.lowering import fits, fitted, lower
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.program.program import Copy, Instruction, Record, Stream, Wait, occupied
from autosched.program.units import waiting_for_host
from autosched.simulated_gpus import playing
from autosched.simulation.footprint import footprint
from autosched.testing.checking import scattered
from tests.strategies import graphs, inputs_for, machines


def limited(machine: Machine, nbytes: Mapping[str, float]) -> Machine:
    devices = [
        replace(device, nbytes=nbytes.get(device.name, device.nbytes)) for device in machine.devices
    ]
    return Machine(devices, machine.links, contention=machine.contention, imagined=True)


def gpu(nbytes: float, gpus: int = 1, **others: float) -> Machine:
    machine = Machine.emulated(gpus=gpus)
    return limited(machine, {**dict.fromkeys(machine.accelerators, nbytes), **others})


def on_gpu(problem: asc.Problem) -> Placement:
    """Place all on the GPU, whatever costs say."""
    names = [task.name for task in problem.graph.tasks]
    return Placement(
        {
            name: task.device or "cuda:0"
            for name, task in zip(names, problem.graph.tasks, strict=True)
        },
        (*names,),
    )


def long_lived() -> Graph:
    """Return a graph whose first value is needed at the end, behind one that leaves no room for it."""
    graph = Graph()
    # Who knows what it reads? So it is not repeated.
    ones = lambda device: torch.ones(3, device=device)  # noqa: E731
    early = graph.add(ones, asc.Here("cpu"), name="early", nbytes=40)
    first = graph.add(torch.zeros, 3, device=asc.Here("cpu"), name="first", nbytes=40)
    second = graph.add(torch.neg, first, name="second", nbytes=40)
    graph.output(y=graph.add(torch.add, early, second, name="y", nbytes=10))
    return graph


def copies(schedule: asc.Schedule) -> list[str]:
    return [str(i) for i in schedule.program if isinstance(i, Copy)]


# ---- what is done, on small graphs


def test_what_has_no_room_goes_to_the_host_and_comes_back() -> None:
    schedule = asc.schedule(long_lived(), gpu(100), policy=on_gpu)
    assert copies(schedule) == ["copy early -> cpu", "copy early <- cpu"]
    assert schedule.peak_bytes["cuda:0"] <= 100
    assert torch.equal(schedule()["y"], torch.ones(3))


def test_what_stands_on_the_host_anyway_needs_no_copy_out() -> None:
    graph = Graph()
    weight = graph.constant(torch.ones(3), "weight")
    x = graph.input("x")
    weight.nbytes, x.nbytes = 40, 0
    used = graph.add(torch.mul, weight, x, name="used", nbytes=0)
    long = graph.add(torch.add, used, used, name="long", nbytes=70)
    graph.output(
        y=graph.add(
            torch.add, weight, graph.add(torch.neg, long, name="neg", nbytes=0), name="y", nbytes=0
        )
    )
    schedule = asc.schedule(graph, gpu(80), policy=on_gpu)
    assert copies(schedule).count("copy weight <- cpu") == 2
    assert not any("weight ->" in copy for copy in copies(schedule))
    assert schedule.peak_bytes["cuda:0"] <= 80


def test_what_has_no_room_goes_and_comes_by_way_of_others() -> None:
    """cpu -- cuda:0 -- cuda:1 -- cuda:2: x has no other way to cuda:2, nor have results to cuda:0."""
    names = ["cpu", "cuda:0", "cuda:1", "cuda:2"]
    links = [asc.Link(a, b, 1e9) for a, b in itertools.pairwise(names)]
    devices = [asc.Device(name, nbytes=math.inf if name == "cpu" else 24.0) for name in names]
    graph = asc.Graph()
    x = graph.input("x")
    made = [graph.add(torch.mul, x, i, name=f"a{i}", nbytes=8, on="cuda:2") for i in range(4)]
    total = x
    for i, value in enumerate([*made, *made]):
        on = "cuda:2" if i < 4 else "cuda:0"
        total = graph.add(torch.add, total, value, name=f"b{i}", nbytes=8, on=on)
    graph.output(y=total)
    machine = asc.Machine(devices, links, imagined=True)
    costs = Costs(nbytes={"x": 8.0})
    with asc.schedule(graph, machine, policy="single", costs=costs, backend="virtual") as schedule:
        assert all(schedule.peak_bytes[name] <= 24 for name in names[1:])
        assert torch.equal(schedule(x=torch.ones(2))["y"], graph.run_serial(x=torch.ones(2))["y"])


def test_what_is_needed_last_goes_first() -> None:
    graph = Graph()
    ones = lambda: torch.ones(3)  # noqa: E731
    late, soon = (graph.add(ones, name=name, nbytes=40) for name in ("late", "soon"))
    large = graph.add(torch.zeros, 3, name="large", nbytes=40)
    sums = graph.add(
        torch.add, soon, graph.add(torch.neg, large, name="neg", nbytes=10), name="sum", nbytes=10
    )
    graph.output(y=graph.add(torch.add, late, sums, name="y", nbytes=0))
    assert copies(asc.schedule(graph, gpu(100), policy=on_gpu)) == [
        "copy late -> cpu",
        "copy late <- cpu",
    ]


def test_where_the_host_is_full_another_device_takes_it() -> None:
    schedule = asc.schedule(long_lived(), gpu(100, gpus=2, cpu=20.0), policy=on_gpu)
    assert copies(schedule) == ["copy early -> cuda:1/copy-in", "copy early -> cuda:0/copy-in"]
    assert schedule.peak_bytes["cpu"] == 0


def test_what_is_read_next_is_fetched_while_a_task_runs() -> None:
    graph = Graph()
    value = graph.input("x")
    value.nbytes = 0
    for number in range(6):
        weight = graph.constant(torch.ones(3), f"weight{number}")
        weight.nbytes = 100
        value = graph.add(torch.add, value, weight, name=f"t{number}", seconds=1.0, nbytes=0)
    graph.output(y=value)
    machine = limited(
        Machine.emulated(gpus=1, bytes_per_second=100.0, latency=0.0), {"cuda:0": 200.0}
    )
    schedule = asc.schedule(graph, machine, policy=on_gpu)
    assert schedule.peak_bytes["cuda:0"] == 200
    assert schedule.makespan == pytest.approx(
        7.0
    )  # copies of one second each behind one another, then the last task


def test_an_input_that_is_written_here_and_there_ends_in_the_callers_memory() -> None:
    graph = Graph()
    x = graph.input("x")
    x.nbytes = 40
    with graph.on("cuda:0"):
        x.mul_(2)
        large = graph.add(
            torch.neg,
            graph.add(torch.ones, 3, device=asc.Here("cpu"), name="large", nbytes=40),
            name="neg",
            nbytes=40,
        )
    with graph.on("cpu"):
        x.add_(1)
    with graph.on("cuda:0"):
        graph.output(y=graph.add(torch.add, x, large, name="y", nbytes=10))
    given = torch.ones(3)
    schedule = asc.schedule(graph, gpu(90))
    assert "copy x@1 -> cpu overwriting" in copies(schedule)
    assert schedule.peak_bytes == {"cpu": 40, "cuda:0": 90}
    assert torch.equal(schedule(x=given)["y"], torch.full((3,), 2.0))
    assert torch.equal(given, torch.full((3,), 3.0))


def test_outputs_may_end_on_the_host_unless_they_are_wanted_elsewhere() -> None:
    graph = Graph()
    graph.output(**{name: graph.add(torch.ones, 3, name=name, nbytes=40) for name in "abc"})
    schedule = asc.schedule(graph, gpu(100), policy=on_gpu)
    assert sorted(dict(schedule.program.outputs).values()) == ["cpu", "cuda:0", "cuda:0"]
    with pytest.raises(
        MemoryLimitError,
        match=r"'cuda:0' has 100 B.*takes 120 B: 'a', 'b', 'c'.*proves that no sched",
    ):
        asc.schedule(graph, gpu(100), policy=on_gpu, outputs="cuda:0")


def test_a_task_that_fits_nowhere_is_named_and_that_is_a_proof() -> None:
    graph = Graph()
    x = graph.input("x")
    x.nbytes = 60
    with graph.on("cuda:0"):
        graph.output(y=graph.add(torch.neg, x, name="y", nbytes=50))
    with pytest.raises(
        MemoryLimitError,
        match=r"'y' fits on no device.*110 B of 100 B on cuda:0.*proves that no sched",
    ):
        asc.schedule(graph, gpu(100))


def test_tasks_that_must_be_together_must_fit_on_one_device() -> None:
    graph = Graph()
    a, b = (graph.add(torch.ones, 3, device=asc.Here("cpu"), name=name, nbytes=50) for name in "ab")
    ended = [
        graph.add(torch.neg, value, on=on, name=f"{value.name}2")
        for value, on in ((a, "cuda:0"), (b, "cuda:1"))
    ]
    graph.together(a, b)
    graph.output(*ended)
    machine = limited(Machine.emulated(gpus=2), {"cuda:0": 10.0, "cuda:1": 100.0, "cpu": 10.0})
    with pytest.raises(MemoryLimitError, match="'a2' fits on no device"):
        asc.schedule(graph, machine)


def test_inputs_that_live_on_a_device_must_fit_there() -> None:
    graph = Graph()
    x = graph.input("x")
    x.nbytes = 101
    graph.output(y=x + 1)
    with pytest.raises(MemoryLimitError, match=r"'cuda:0' has 100 B of memory.*takes 101 B: 'x'"):
        asc.schedule(graph, gpu(100), inputs="cuda:0")


def test_what_is_written_in_parts_cannot_leave_and_is_named() -> None:
    graph = Graph()
    base = graph.add(torch.ones, 4, name="base", nbytes=60)
    base[1:].mul_(2)
    large = graph.add(torch.zeros, 3, name="large", nbytes=60, after=[base])
    base[:1].mul_(3)
    graph.output(base, y=graph.add(torch.neg, large, name="neg", nbytes=0, on="cuda:0"))
    machine = limited(Machine.emulated(gpus=0), {"cpu": 100.0})
    machine = Machine([replace(machine.devices[0], name="cuda:0")], imagined=True)
    with pytest.raises(
        MemoryLimitError,
        match=r"holds 60 B that cannot leave \('base' \(60 B\)\), and needs 60 B.*nothi",
    ):
        asc.schedule(graph, machine)


def test_no_policy_puts_a_task_where_it_cannot_fit_and_the_bound_knows() -> None:
    graph = Graph()
    graph.output(
        y=graph.add(torch.ones, 3, name="y", nbytes=101, seconds={"cpu": 3.0, "cuda:0": 1.0})
    )
    schedule = asc.schedule(graph, gpu(100), policy="heft")
    assert schedule.placement.device == {"y": "cpu"}
    assert schedule.lower_bound == schedule.makespan == 3


def test_explain_says_what_had_to_leave() -> None:
    assert "memory of cuda:0 does not hold all at once: 1 copy brings back 'early' (40 B)" in str(
        asc.schedule(long_lived(), gpu(100), policy=on_gpu).explain()
    )
    assert "hold all at once" not in str(
        asc.schedule(long_lived(), gpu(120), policy=on_gpu).explain()
    )


def test_a_version_may_come_again_only_once_it_was_freed() -> None:
    schedule = asc.schedule(long_lived(), gpu(100), policy=on_gpu)
    left = [i for i in schedule.program if str(i) != "free early" or i.stream.device == "cpu"]
    with pytest.raises(asc.ProgramError, match="'early' on cuda:0 is there already"):
        asc.verify(replace(schedule.program, instructions=tuple(left)), schedule.graph)


# ---- the laws, on any graph


def most_held(schedule: asc.Schedule, seed: int, threads: bool = False) -> dict[str, float]:
    """Return the most that each device holds if streams come to their instructions in some order that events allow.

    By ``threads``, those that need not wait for a CPU keep to the order of issue among themselves.
    """
    chance, program = random.Random(seed), schedule.program
    on_gpu = {s for s in program.streams if schedule.machine.device(s.device).is_accelerator}
    alone = waiting_for_host(program, on_gpu)

    def occupied_by(instruction: Instruction) -> tuple[Stream, ...]:
        if not threads:
            return occupied(instruction)
        return (instruction.stream if instruction.stream in alone else Stream("", "caller"),)

    courses = footprint(program, schedule.problem)
    held = {name: course[0] for name, course in courses.items()}
    most = dict(held)
    left: dict[Stream, list[int]] = {}
    for i, instruction in enumerate(program):
        for stream in occupied_by(instruction):
            left.setdefault(stream, []).append(i)
    eager = {stream: chance.random() for stream in left}
    seen: set[int] = set()
    while any(left.values()):
        ready = [
            s
            for s, queue in left.items()
            if queue
            and may_go(program.instructions[queue[0]], seen)
            and all(
                left[other][0] == queue[0] for other in occupied_by(program.instructions[queue[0]])
            )
        ]
        stream = (
            max(ready, key=eager.__getitem__) if chance.random() < 0.8 else chance.choice(ready)
        )
        i = left[stream][0]
        for other in occupied_by(program.instructions[i]):
            left[other].pop(0)
        if isinstance(record := program.instructions[i], Record):
            seen.add(record.event)
        for name, course in courses.items():
            held[name] += course[i + 1] - course[i]
            most[name] = max(most[name], held[name])
    return most


def may_go(instruction: Instruction, seen: set[int]) -> bool:
    return not isinstance(instruction, Wait) or instruction.event in seen


def least(graph: Graph, machine: Machine, costs: Costs) -> Machine:
    """Return the machine with accelerators that have what the largest task needs alone, and not a byte more."""
    needs = dict.fromkeys(machine.accelerators, 1.0)
    for name in machine.accelerators:
        for task in graph.tasks:
            roots = {
                graph.values[use.value].root
                for use in (*task.reads, *task.outputs)
                if graph.is_used(use.value)
            }
            homes = {value.index for value in graph.sources if value.home == name}
            needs[name] = max(
                needs[name], sum(costs.value_nbytes(graph.values[root]) for root in roots | homes)
            )
    return limited(machine, needs)


def drawn_costs(data: st.DataObject, graph: Graph) -> Costs:
    sizes = {value.name: float(data.draw(st.integers(1, 100))) for value in graph.values}
    return Costs(default_seconds=1e-5, nbytes=sizes)


def assert_as_serial(schedule: asc.Schedule, graph: Graph) -> None:
    torch.manual_seed(3)
    expected_inputs = inputs_for(graph)
    expected = graph.run_serial(**expected_inputs)
    torch.manual_seed(3)
    inputs = inputs_for(graph)
    with schedule:
        outputs = schedule(**inputs)
    assert all(torch.equal(outputs[label], expected[label]) for label in expected)
    assert all(torch.equal(inputs[name], expected_inputs[name]) for name in inputs)


def assert_keeps_to_memory(schedule: asc.Schedule, seed: int) -> None:
    assert fits(schedule.program, schedule.problem)
    most = most_held(schedule, seed, threads=True)
    for device in schedule.machine.devices:
        assert most[device.name] <= schedule.peak_bytes[device.name] <= device.nbytes
    # Made to fit: then it does in time too, however streams come to it.
    if schedule.program != lower(schedule.problem, schedule.placement):
        most = most_held(schedule, seed)
        assert all(most[device.name] <= device.nbytes for device in schedule.machine.devices)


POLICIES: Sequence[str | Policy] = ("heft", "single", scattered(0), scattered(1))


@given(graph=graphs(views=False, most=20), machine=machines(), data=st.data())
def test_law_with_a_host_a_graph_runs_in_as_little_as_its_largest_task_needs(
    graph: Graph, machine: Machine, data: st.DataObject
) -> None:
    costs = drawn_costs(data, graph)
    policy = data.draw(st.sampled_from(POLICIES))
    schedule = asc.schedule(
        graph, least(graph, machine, costs), policy=policy, costs=costs, backend="emulated"
    )
    assert_keeps_to_memory(schedule, data.draw(st.integers(0, 99)))
    assert_as_serial(schedule, graph)


@given(graph=graphs(most=20), machine=machines(), share=st.floats(0.3, 1.0), data=st.data())
def test_law_a_schedule_keeps_to_memory_or_is_refused(
    graph: Graph, machine: Machine, share: float, data: st.DataObject
) -> None:
    costs = drawn_costs(data, graph)
    policy = data.draw(st.sampled_from(POLICIES))
    peaks = asc.schedule(graph, machine, policy=policy, costs=costs).peak_bytes
    nbytes = {
        name: max(1.0, share * peak) for name, peak in peaks.items() if data.draw(st.booleans())
    }
    try:
        schedule = asc.schedule(
            graph, limited(machine, nbytes), policy=policy, costs=costs, backend="host"
        )
    except MemoryLimitError:
        return
    assert_keeps_to_memory(schedule, data.draw(st.integers(0, 99)))
    assert_as_serial(schedule, graph)


@given(graphs(most=20), machines(), st.sampled_from(POLICIES), st.integers(0, 99))
def test_law_whichever_thread_is_ahead_no_device_holds_more_than_its_peak(
    graph: Graph, machine: Machine, policy: str | Policy, seed: int
) -> None:
    costs = Costs(default_seconds=1e-5, nbytes={v.name: 1.0 + v.index % 7 for v in graph.values})
    schedule = asc.schedule(graph, machine, policy=policy, costs=costs)
    most = most_held(schedule, seed, threads=True)
    issued = footprint(schedule.program, schedule.problem)
    for name, peak in schedule.peak_bytes.items():
        assert max(most[name], *issued[name]) <= peak


def test_copies_that_a_thread_issues_early_fit_into_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes numbers of AdamW, for which the streams of the GPU wait, each in a thread of its own.

    That of copies is ahead of that of tasks, so it holds all state at once where nothing makes it wait.
    """
    monkeypatch.setattr(capture, "check_modes", lambda: None)
    layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options: dict[str, Any] = {"place": {"*": "cuda:0"}, "replay": False}
    x = torch.ones(256, 128)
    with playing(gpus=1, nbytes=1.2e6):  # of 1.5e6 that are held without limit
        machine = Machine.local()
        with asc.compile(step, machine, **options) as run:
            for _ in range(3):
                run(x)
            torch.cuda.synchronize()
            assert run.schedule(x).peak_bytes["cuda:0"] <= machine.device("cuda:0").nbytes
            assert torch.cuda.max_memory_allocated() <= 1.01 * run.schedule(x).peak_bytes["cuda:0"]


@given(graph=graphs(), machine=machines())
def test_law_memory_that_suffices_changes_no_program(graph: Graph, machine: Machine) -> None:
    costs = Costs(default_seconds=1e-5, default_nbytes=100)
    free = asc.schedule(graph, machine, policy="heft", costs=costs)
    enough = limited(machine, {name: max(1.0, peak) for name, peak in free.peak_bytes.items()})
    assert fitted(asc.Problem(graph, enough, costs), free.placement) == free.program
