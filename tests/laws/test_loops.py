"""Laws of loops: what lowering makes is proved, no carried wait can be left out, and runs do not disturb each other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.lowering import lower
from autosched.problem import Constraints
from autosched.program.program import Copy, Free, Instruction, Program, Record, Stream, Wait
from autosched.testing.checking import SharedState
from autosched.verification.verify import verify
from tests.loop_model import Choose, Tensors, execute
from tests.reference import LoopReference, RefusedError
from tests.sample_policies import policies
from tests.strategies import given_to, graphs, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
loops = st.integers(2, 4)


def looped(
    graph: asc.Graph, machine: asc.Machine, policy: str, in_flight: int
) -> tuple[Program, Program]:
    """The program of one run, and the loop."""
    schedule = asc.schedule(graph, machine, policy=policy, costs=COSTS)
    outputs = dict(schedule.program.outputs)
    loop = lower(
        asc.Problem(schedule.graph, machine, constraints=Constraints(outputs)),
        schedule.placement,
        in_flight=in_flight,
    )
    return schedule.program, loop


def is_accepted(program: Program, graph: asc.Graph) -> bool:
    try:
        verify(program, graph)
    except asc.ProgramError:
        return False
    return True


def reference_accepts(program: Program, graph: asc.Graph, cautious: bool = False) -> bool:
    try:
        LoopReference(program, graph, cautious)
    except RefusedError:
        return False
    return True


def agree(program: Program, graph: asc.Graph) -> bool:
    """Whether ``verify`` refuses what addresses of bytes rule out, and no more than regions do."""
    if is_accepted(program, graph):
        return reference_accepts(program, graph)
    return not reference_accepts(program, graph, cautious=True)


def carried(program: Program) -> list[int]:
    return [at for at, i in enumerate(program) if isinstance(i, Wait) and i.ago]


def changed(program: Program, at: int, *lines: Instruction) -> Program:
    before, after = program.instructions[:at], program.instructions[at + 1 :]
    return replace(program, instructions=(*before, *lines, *after))


@settings(max_examples=2 * settings().max_examples)
@given(policy=policies, graph=graphs(most=10, state=True), machine=machines(), in_flight=loops)
def test_every_loop_is_proved_and_needs_each_carried_wait(
    policy: str, graph: asc.Graph, machine: asc.Machine, in_flight: int
) -> None:
    _, loop = looped(graph, machine, policy, in_flight)
    verify(loop, graph, machine)
    for at in carried(loop):
        wait = loop.instructions[at]
        assert not is_accepted(changed(loop, at), graph), f"{wait}\n{graph}\n{loop}"
        assert isinstance(wait, Wait)
        assert wait.ago == 1


@given(graph=graphs(state=True), machine=machines(), in_flight=loops)
def test_a_loop_is_the_program_of_one_run_without_its_end(
    graph: asc.Graph, machine: asc.Machine, in_flight: int
) -> None:
    single, loop = looped(graph, machine, "heft", in_flight)
    waited = {i.event for i in loop if isinstance(i, Wait) and not i.ago}
    kept = [
        i
        for i in loop
        if not (isinstance(i, Wait) and i.ago)
        and not (isinstance(i, Record) and i.event not in waited)
    ]
    assert {i.event for i in loop if isinstance(i, Record)} == {
        i.event for i in loop if isinstance(i, Wait)
    }
    assert tuple(kept) == single.instructions[: len(kept)]
    assert all(isinstance(i, (Record, Wait, Free)) for i in single.instructions[len(kept) :])
    assert (loop.inputs, loop.outputs) == (single.inputs, single.outputs)
    assert Program.parse(str(loop)) == loop


def edits(program: Program, source: random.Random) -> Iterator[Program]:
    """Loops without one instruction, or with one elsewhere, or a wait for another event."""
    lines = program.instructions
    events = [i.event for i in lines if isinstance(i, Record)]
    for at, line in enumerate(lines):
        yield changed(program, at)
        streams = [s for s in program.streams if s != line.stream]
        if streams:
            yield changed(program, at, replace(line, stream=source.choice(streams)))
        if isinstance(line, Copy):
            devices = sorted({stream.device for stream in program.streams})
            yield changed(program, at, replace(line, source=source.choice(devices)))
            yield changed(program, at, replace(line, destination=source.choice(devices)))
        if not isinstance(line, (Record, Wait)):
            continue
        rest = [*lines[:at], *lines[at + 1 :]]
        to = source.randrange(len(lines))
        yield replace(program, instructions=(*rest[:to], line, *rest[to:]))
        if isinstance(line, Wait):
            yield changed(program, at, replace(line, event=source.choice(events)))
            yield changed(program, at, replace(line, ago=source.randrange(3)))


@given(
    graph=graphs(most=8, state=True), machine=machines(), in_flight=loops, seed=st.integers(0, 999)
)
def test_verify_refuses_exactly_the_loops_that_the_reference_refuses(
    graph: asc.Graph, machine: asc.Machine, in_flight: int, seed: int
) -> None:
    _, loop = looped(graph, machine, "round_robin", in_flight)
    assert reference_accepts(loop, graph)
    for other in edits(loop, random.Random(seed)):
        assert agree(other, graph), f"{graph}\n{other}"


def chosen(seed: int) -> Choose:
    """A choice that prefers some streams for a while, so that they are far ahead of others."""
    source = random.Random(seed)
    rank: dict[Stream, float] = {}

    def choose(ready: Sequence[Stream]) -> Stream:
        if source.random() < 0.02:
            rank.clear()
        return max(ready, key=lambda stream: rank.setdefault(stream, source.random()))

    return choose


class Serial:
    """The outputs of runs one after another, and the inputs and the state that they leave."""

    def __init__(self, graph: asc.Graph, runs: int):
        self.state = SharedState(graph)
        self.inputs = given_to(graph, runs)
        self.outputs: list[Tensors] = []
        self.at_once: list[Tensors] = []
        torch.manual_seed(3)
        for inputs in self.inputs:
            self.outputs.append(graph.run_serial(**inputs))
            self.at_once.append(copies(self.outputs[-1]))
        self.outputs = [*map(copies, self.outputs)]  # constants may be among them
        self.left = self.state.copies()
        self.state.restore()

    def agrees(self, run: int, label: str, item: torch.Tensor, is_own: bool) -> bool:
        """Whether it is an output as it must be: as its run left it, or, if in the caller's memory, as the last did."""
        expected = self.at_once if is_own else self.outputs
        return torch.equal(item, expected[run][label])


def copies(tensors: Tensors) -> Tensors:
    return {name: item.clone() for name, item in tensors.items()}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_interleaving(loop: Program, graph: asc.Graph, seed: int) -> None:
    """Execute a loop with streams in an order of this seed; compare with runs one after another."""
    runs = loop.in_flight + 2
    serial = Serial(graph, runs)
    inputs = given_to(graph, runs)
    torch.manual_seed(3)
    outputs = execute(loop, graph, inputs, chosen(seed))
    left = serial.state.copies()
    constants = [value.tensor for value in graph.sources if value.tensor is not None]
    given = {*map(storage, constants)}.union(
        *(map(storage, tensors.values()) for tensors in inputs)
    )
    for run, found in enumerate(outputs):
        assert list(found) == list(graph.outputs)
        for label, item in found.items():
            assert serial.agrees(run, label, item, storage(item) not in given), f"{graph}\n{loop}"
    serial.state.restore()
    for one, other in zip([*inputs, left], [*serial.inputs, serial.left], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other), f"{graph}\n{loop}"


@settings(max_examples=2 * settings().max_examples)
@given(
    policy=policies,
    graph=graphs(state=True),
    machine=machines(),
    in_flight=loops,
    seed=st.integers(0, 99),
)
def test_runs_in_any_interleaving_do_what_they_do_one_after_another(
    policy: str, graph: asc.Graph, machine: asc.Machine, in_flight: int, seed: int
) -> None:
    check_interleaving(looped(graph, machine, policy, in_flight)[1], graph, seed)
