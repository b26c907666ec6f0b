"""Copies between GPUs of ranks, over a fake of NCCL that checks its rules; threads play ranks."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Program
from autosched.runtime.execute import Executor
from autosched.runtime.ranks.backend import AcceleratorRanks
from autosched.simulated_gpus import playing
from tests.gpu.fake_nccl import Way, World
from tests.strategies import graphs, inputs_for

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
PATIENCE = 20.0


class Hub:
    """What threads that play ranks have instead of gloo."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.rows: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.why = ""


class Host:
    """What ``ProcessGroupGloo`` has."""

    def __init__(self, hub: Hub, rank: int):
        self.hub = hub
        self.rank = rank

    def send(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> Received:
        """Send a row."""
        with self.hub.changed:
            row = rows[0].detach().clone().reshape(-1).view(torch.uint8)
            self.hub.rows[self.rank, peer, tag].append(row)
            self.hub.changed.notify_all()
        return Received(self.hub, None, None)

    def recv(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> Received:
        """Receive a row."""
        return Received(self.hub, rows[0], (peer, self.rank, tag))


class Received:
    """A work between hosts."""

    def __init__(self, hub: Hub, row: torch.Tensor | None, key: Any):
        self.hub, self.row, self.key = hub, row, key

    def wait(self) -> None:
        """Wait for a row."""
        if self.row is None:
            return
        with self.hub.changed:
            rows = self.hub.rows[self.key]
            there = self.hub.changed.wait_for(lambda: rows or self.hub.why, PATIENCE)
            if self.hub.why or not there:
                raise RuntimeError("Connection closed by peer" if self.hub.why else "it hangs")
            self.row.view(-1).view(torch.uint8).copy_(rows.popleft())


class Group:
    """What a rank has of the others."""

    def __init__(self, hub: Hub, rank: int):
        self.hub = hub
        self.rank = rank
        self.users: Any = weakref.WeakSet()

    @property
    def why(self) -> str | None:
        """Why a run has failed."""
        return self.hub.why or None

    def way(self, source: int, target: int, is_direct: bool = False) -> Host | Way:
        """Return the group for what one rank sends to another."""
        return Way(self.hub.world, self.rank) if is_direct else Host(self.hub, self.rank)

    def check(self) -> None:
        """Find no failure."""

    def named(self, rank: int) -> str:
        """Return a rank."""
        return f"rank {rank}"

    def fail(self, kind: str, why: str) -> None:
        """Let all ranks fail."""
        with self.hub.changed:
            self.hub.why = self.hub.why or why
            self.hub.changed.notify_all()
        for rank in range(len(self.hub.world.gpus.current)):
            self.hub.world.abort(rank)

    def lost(self, pending: str, *_: Any) -> asc.RankError:
        """Return the error of a failure."""
        return asc.RankError(f"{self.hub.why}\n    rank {self.rank} waited: {pending}")


class PlayedRanks(AcceleratorRanks):
    """A rank that a thread plays."""

    def __init__(self, group: Group):
        super().__init__()
        self.own_group = group

    def attach(self, program: Program, machine: asc.Machine) -> None:
        self.group = self.own_group  # type: ignore[assignment]
        self.part = program

    def begin(self, stopped: Any) -> None:
        super().begin(stopped)
        self.own_group.hub.world.begin(self.group.rank)

    def join(self) -> None:
        super().join()
        self.own_group.hub.world.end(self.group.rank)


def cluster(ranks: int) -> asc.Machine:
    """A machine of ranks with a played GPU each, which a network joins directly."""
    network = asc.Network(1e9, 1e-5, direct=True)
    made = asc.Machine.emulated(gpus=1, hosts=ranks, network=network)
    devices = [replace(d, imagined=False, physical=None) for d in made.devices]
    return asc.Machine(devices, made.links, network=made.network)


class Cluster:
    """The executors of all ranks of a program, in threads."""

    def __init__(self, program: Program, graph: asc.Graph, machine: asc.Machine, gpus: Any):
        self.world = World(gpus)
        self.program = program
        self.machine = machine
        hub = Hub(self.world)
        self.executors = []
        for rank in range(len(machine.accelerators)):
            part = program.part(rank)
            backend = PlayedRanks(Group(hub, rank))
            self.executors.append(Executor(part, graph, machine, backend, [0.0] * len(part)))

    def run(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """Run once; return the outputs of each rank, on the host, or what it raised."""
        homes = dict(self.program.inputs)
        found: list[Any] = [None] * len(self.executors)

        def run(rank: int) -> None:
            own = {n: t for n, t in inputs.items() if self.machine.ranks[homes[n]] == rank}
            given = {n: t.to(self.machine.physical[homes[n]] or "cpu") for n, t in own.items()}
            try:
                made = {**given, **self.executors[rank](given)}
                found[rank] = {name: tensor.cpu() for name, tensor in made.items()}
            except BaseException as error:
                found[rank] = error

        count = range(len(self.executors))
        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in count]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a rank hangs"
        return found

    def close(self) -> None:
        """End all threads."""
        for executor in self.executors:
            executor.close()


def planned(graph: asc.Graph, machine: asc.Machine, policy: str = "auto") -> Program:
    imagined = replace(machine, imagined=True)
    return asc.schedule(graph, imagined, policy=policy, costs=COSTS).program


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    data=st.data(),
    ranks=st.integers(2, 4),
    policy=st.sampled_from(["round_robin", "heft"]),
    seed=st.integers(0, 10**6),
)
def test_every_program_keeps_the_rules_of_nccl_and_gives_what_the_serial_run_gives(
    data: st.DataObject, ranks: int, policy: str, seed: int
) -> None:
    machine = cluster(ranks)
    graph = data.draw(graphs(machine.names))
    assume(not any(task.random for task in graph.tasks))
    try:
        program = planned(graph, machine, policy)
    except asc.ScheduleError as error:
        assume("one rank" not in str(error))
        raise
    expected = inputs_for(graph)
    expected |= graph.run_serial(**expected)
    with playing(ranks, seed) as gpus:
        over = Cluster(program, graph, machine, gpus)
        for _ in range(3):
            for found in over.run(inputs_for(graph)):
                if isinstance(found, BaseException):
                    raise found
                assert all(torch.equal(item, expected[name]) for name, item in found.items())
        over.close()
        over.world.check()


def ring(ranks: int, rounds: int = 2) -> asc.Graph:
    """A graph in which each GPU sends to the next, all at once."""
    graph = asc.Graph("ring")
    values = []
    for rank in range(ranks):
        with graph.on(f"cuda:{rank}"):
            values.append(graph.input(f"x{rank}") * 2)
    for _ in range(rounds):
        moved = []
        for rank in range(ranks):
            with graph.on(f"cuda:{rank}"):
                moved.append(torch.sin(values[rank - 1]) + values[rank])
        values = moved
    graph.output(**{f"y{rank}": value for rank, value in enumerate(values)})
    return graph


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_in_a_ring_send_and_receive_at_once(ranks: int) -> None:
    graph = ring(ranks)
    machine = cluster(ranks)
    with playing(ranks, 3) as gpus:
        gpus.eagerness = 0.0
        over = Cluster(planned(graph, machine), graph, machine, gpus)
        for number in range(3):
            inputs = {f"x{r}": torch.full((4, 5), r + number / 4) for r in range(ranks)}
            expected = graph.run_serial(**inputs)
            for rank, found in enumerate(over.run(inputs)):
                assert not isinstance(found, BaseException), found
                assert torch.equal(found[f"y{rank}"], expected[f"y{rank}"])
        over.close()
        over.world.check()


OPERATIONS = 4  # of a rank in a run of a ring of two


@pytest.mark.parametrize("late", [False, True])
def test_a_task_that_raises_ends_the_run_of_all_ranks(late: bool) -> None:
    """Late: when the other rank has issued all its copies, which end when they are aborted."""
    graph = ring(2)
    runs = [0]

    def double(x: torch.Tensor, factor: float) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            until(lambda: not late or len(over.world.issued[1]) >= 3 * OPERATIONS)
            raise ValueError("of a test")
        return x * factor

    graph.tasks[0] = replace(graph.tasks[0], fn=double)
    machine = cluster(2)
    with playing(2, 1) as gpus:
        over = Cluster(planned(graph, machine), graph, machine, gpus)
        inputs = {f"x{r}": torch.full((3,), float(r)) for r in range(2)}
        for _ in range(2):
            assert not any(isinstance(found, BaseException) for found in over.run(inputs))
        first, second = over.run(inputs)
        over.close()
    assert isinstance(first, asc.TaskError)
    assert f"task {graph.tasks[0].name!r}" in str(first)
    assert isinstance(second, asc.RankError), second
    assert "of a test" in str(second)


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("crossed", [False, True])
def test_the_fake_notes_exchanges_in_different_orders(crossed: bool) -> None:
    with playing(2) as gpus:
        world = World(gpus)
        rows = [torch.zeros(1, device=f"cuda:{rank}") for rank in range(2)]
        one, other = (Way(world, rank) for rank in range(2))
        steps = [
            lambda: other.send([rows[1]], 0, 0).wait(),
            lambda: other.recv([rows[1]], 0, 0).wait(),
        ]
        one.send([rows[0]], 1, 0).wait()
        one.recv([rows[0]], 1, 0).wait()
        with torch.cuda.device(1):
            for step in steps if crossed else steps[::-1]:
                step()
        if crossed:
            with pytest.raises(AssertionError, match="GPUs issue exchanges in different orders"):
                world.check()
        else:
            world.check()
        gpus.elsewhere = bool
        if crossed:  # neither stream goes on before the other one has
            with pytest.raises(RuntimeError, match="wait for each other"):
                torch.cuda.synchronize()
        else:
            torch.cuda.synchronize()
