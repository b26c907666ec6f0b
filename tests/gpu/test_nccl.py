"""Direct copies between GPUs of ranks, over a fake of NCCL that checks its rules; threads play ranks."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.machine.network import Network
from autosched.program.program import Program
from autosched.runtime.execute import Executor
from autosched.runtime.ranks.accelerators import AcceleratorRanks
from autosched.runtime.ranks.direct import number_of
from autosched.runtime.ranks.nccl import Channel, channels
from autosched.testing import graphs, inputs_for
from tests.gpu.fake_gpu import playing
from tests.gpu.fake_nccl import World

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
PATIENCE = 20.0


class Hub:
    """What threads that play ranks have instead of gloo."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.rows: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.sessions: list[Session] = []
        self.lost = False
        self.why = ""

    def lose(self) -> None:
        """Wake whoever waits, and let each rank learn of it."""
        with self.changed:
            self.lost = True
            self.changed.notify_all()
        for session in self.sessions:
            session.lose()


class HostWire:
    """A rank's wire of the hosts."""

    def __init__(self, hub: Hub, rank: int):
        self.hub = hub
        self.rank = rank
        self.others: list[Any] = []

    @property
    def is_lost(self) -> bool:
        return self.hub.lost

    def sender(self, rank: int, tag: int) -> Callable[[torch.Tensor], Any]:
        return lambda row: self.send(row, rank, tag)

    def receiver(self, rank: int, tag: int) -> Callable[[torch.Tensor], Any]:
        return lambda row: self.receive(row, rank, tag)

    def send(self, row: torch.Tensor, rank: int, tag: int) -> Any:
        with self.hub.changed:
            self.hub.rows[self.rank, rank, tag].append(
                row.detach().clone().reshape(-1).view(torch.uint8)
            )
            self.hub.changed.notify_all()
        return Received(self.hub, None, None)

    def receive(self, row: torch.Tensor, rank: int, tag: int) -> Any:
        return Received(self.hub, row, (rank, self.rank, tag))


class Received:
    """A work of the hosts' wire."""

    def __init__(self, hub: Hub, row: torch.Tensor | None, key: Any):
        self.hub, self.row, self.key = hub, row, key

    def wait(self) -> None:
        if self.row is None:
            return
        with self.hub.changed:
            rows = self.hub.rows[self.key]
            there = self.hub.changed.wait_for(lambda: rows or self.hub.lost, PATIENCE)
            if self.hub.lost or not there:
                raise RuntimeError("Connection closed by peer" if self.hub.lost else "it hangs")
            row = rows.popleft()
        self.row[: len(row)].copy_(row)


class Session:
    """What a rank knows of the others."""

    def __init__(self, hub: Hub, world: World, rank: int):
        self.hub, self.world, self.rank = hub, world, rank
        self.told: Any = None
        self.own = HostWire(hub, rank)
        hub.sessions.append(self)

    @property
    def is_lost(self) -> bool:
        return self.hub.lost

    def wire(self) -> HostWire:
        return self.own

    def register(self, exchange: Any) -> None:
        """The exchanges of a test are not told."""

    def begin_run(self, wire: HostWire | None = None) -> HostWire:
        return wire or self.wire()

    def named(self, rank: int) -> str:
        return f"rank {rank}"

    def give_up(self, kind: str, why: str) -> None:
        self.hub.why = self.hub.why or why
        self.hub.lose()

    def lose(self) -> None:
        for other in self.own.others:
            other.lose()

    def cause(self, pending: str) -> asc.RankError:
        self.told = asc.RankError(f"{self.hub.why}\n    rank {self.rank} waited: {pending}")
        self.hub.lose()
        return self.told


class PlayedRanks(AcceleratorRanks):
    """A rank that a thread plays."""

    def __init__(self, whole: Program, session: Session):
        super().__init__(whole)
        self.own_session = session

    def attach(self, program: Program, machine: asc.Machine) -> None:
        self.session = self.own_session  # type: ignore[assignment]
        self.part = program

    def connect(self, device: str) -> Any:
        return self.own_session.world.connect(number_of(device))

    def begin(self, stopped: Any) -> None:
        super().begin(stopped)
        self.own_session.world.begin(self.session.rank)

    def join(self) -> None:
        super().join()
        self.own_session.world.end(self.session.rank)


def cluster(ranks: int, gpus: int = 1) -> asc.Machine:
    """A machine of ranks with some played GPUs each, which a network joins directly."""
    made = asc.Machine.emulated(gpus=gpus, hosts=ranks, network=Network(1e9, 1e-5, direct=True))
    devices = [replace(d, imagined=False, physical=None) for d in made.devices]
    return asc.Machine(devices, made.links, network=made.network)


class Cluster:
    """The executors of all ranks of a program, in threads."""

    def __init__(self, program: Program, graph: asc.Graph, machine: asc.Machine, gpus: Any):
        ranks = [machine.ranks[name] for name in machine.accelerators]
        self.world = World(gpus, range(len(ranks)), ranks)
        self.hub = Hub()
        self.program = program
        self.machine = machine
        self.ranks = sorted({*machine.ranks.values()})
        self.sessions = [Session(self.hub, self.world, rank) for rank in self.ranks]
        self.executors = []
        for session in self.sessions:
            part = program.part(session.rank)
            backend = PlayedRanks(program, session)
            made = Executor(part, graph, machine, backend, [0.0] * len(part))
            self.executors.append(made)

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """Return what a function returns or raises in each rank."""
        found: list[Any] = [None] * len(self.ranks)

        def run(rank: int) -> None:
            try:
                found[rank] = call(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a rank hangs"
        return found

    def run(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """Run once; return the outputs of each rank, on the host."""
        homes = dict(self.program.inputs)

        def call(rank: int) -> dict[str, torch.Tensor]:
            own = {n: t for n, t in inputs.items() if self.machine.ranks[homes[n]] == rank}
            given = {n: t.to(self.place(homes[n])) for n, t in own.items()}
            found = {**given, **self.executors[rank](given)}
            return {name: tensor.cpu() for name, tensor in found.items()}

        return self.each(call)

    def place(self, device: str) -> str:
        return self.machine.physical[device] or "cpu"

    def close(self) -> None:
        self.world.close()
        for executor in self.executors:
            executor.close()


def ran(graph: asc.Graph, machine: asc.Machine, policy: str, seed: int, runs: int = 3) -> list[Any]:
    """Run a graph over ranks, some times; return what differs from the serial run."""
    program = asc.schedule(
        graph, replace(machine, imagined=True), policy=policy, costs=COSTS
    ).program
    expected = inputs_for(graph)
    expected |= graph.run_serial(**expected)
    wrong: list[Any] = []
    with playing(len(machine.accelerators), seed) as gpus:
        over = Cluster(program, graph, machine, gpus)
        for _ in range(runs):
            for found in over.run(inputs_for(graph)):
                if isinstance(found, BaseException):
                    raise found
                wrong += [n for n, item in found.items() if not torch.equal(item, expected[n])]
        over.close()
        over.world.check()
    return wrong


# ---- the law


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    data=st.data(),
    shape=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]),
    policy=st.sampled_from(["round_robin", "heft"]),
    seed=st.integers(0, 10**6),
)
def test_every_program_keeps_the_rules_of_nccl_and_gives_what_the_serial_run_gives(
    data: st.DataObject, shape: tuple[int, int], policy: str, seed: int
) -> None:
    machine = cluster(*shape)
    graph = data.draw(graphs(machine.names))
    assume(not any(task.random for task in graph.tasks))
    try:
        assert ran(graph, machine, policy, seed) == []
    except asc.ScheduleError as error:
        assume("one rank" not in str(error))
        raise


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


def run_ring(ranks: int, rounds: int = 2, seed: int = 3) -> None:
    """Run a ring on ranks, with other numbers in each run."""
    graph = ring(ranks, rounds)
    machine = cluster(ranks)
    program = asc.schedule(graph, replace(machine, imagined=True), costs=COSTS).program
    with playing(ranks, seed) as gpus:
        gpus.eagerness = 0.0
        over = Cluster(program, graph, machine, gpus)
        for number in range(3):
            inputs = {f"x{r}": torch.full((4, 5), r + number / 4) for r in range(ranks)}
            expected = graph.run_serial(**inputs)
            for rank, found in enumerate(over.run(inputs)):
                assert not isinstance(found, BaseException), found
                assert torch.equal(found[f"y{rank}"], expected[f"y{rank}"])
        over.close()
        over.world.check()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_in_a_ring_send_and_receive_at_once(ranks: int) -> None:
    run_ring(ranks)


def everybody(gpus: int) -> asc.Graph:
    """A graph in which each GPU sends to all others."""
    graph = asc.Graph("all to all")
    values = []
    for gpu in range(gpus):
        with graph.on(f"cuda:{gpu}"):
            values.append(graph.input(f"x{gpu}") * 2)
    for gpu in range(gpus):
        with graph.on(f"cuda:{gpu}"):
            total = values[gpu]
            for other in range(1, gpus):
                total = total + values[(gpu + other) % gpus]
            graph.output(**{f"y{gpu}": total})
    return graph


def run_everybody(ranks: int, gpus: int) -> World:
    """Let each GPU of so many ranks send to all others, once."""
    total = ranks * gpus
    graph = everybody(total)
    machine = cluster(ranks, gpus)
    program = asc.schedule(graph, replace(machine, imagined=True), costs=COSTS).program
    with playing(total, 1) as played:
        over = Cluster(program, graph, machine, played)
        inputs = {f"x{gpu}": torch.full((3,), float(gpu)) for gpu in range(total)}
        for found in over.run(inputs):
            assert not isinstance(found, BaseException), found
            made = [tensor.tolist() for name, tensor in found.items() if name.startswith("y")]
            assert made == [[float(total * (total - 1))] * 3] * gpus
        over.close()
        over.world.check()
    return over.world


def test_gpus_with_many_neighbours_have_a_communicator_for_each_colour() -> None:
    assert [len(made) for made in run_everybody(4, 1).made.values()] == [4] * 4


def test_two_gpus_of_a_process_may_be_in_one_communicator() -> None:
    world = run_everybody(3, 2)
    assert max(len(at.gpus) for made in world.made.values() for at in made) == 6


# ---- channels


@given(
    size=st.integers(2, 40),
    data=st.data(),
)
def test_no_gpu_sends_and_receives_over_one_communicator(size: int, data: st.DataObject) -> None:
    arc = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    arcs = data.draw(st.sets(arc.filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=60))
    found = channels(arcs)
    assert found == channels(sorted(arcs))
    assert found.keys() == arcs
    assert not {(a, at) for (a, _), at in found.items()} & {(b, at) for (_, b), at in found.items()}
    for at in {*found.values()}:
        assert {gpu for arc, found_at in found.items() if found_at == at for gpu in arc} == {
            *at.gpus
        }
    for gpu in range(size):
        mine = [at for at in {*found.values()} if gpu in at.gpus]
        assert len(mine) == len({at.colour for at in mine})  # a colour once
        assert len(mine) <= min(sum(gpu in arc for arc in arcs), 2 * (size - 1).bit_length())


# ---- failures


OPERATIONS = 4  # of a rank in a run of a ring of two


def failing(before: Callable[[], object]) -> tuple[asc.Graph, Program, asc.Machine]:
    """Return a ring of two whose first task raises in the third run, after a call of ``before``."""
    graph = ring(2)
    runs = [0]

    def double(x: torch.Tensor, factor: float) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            before()
            raise ValueError("of a test")
        return x * factor

    graph.tasks[0] = replace(graph.tasks[0], fn=double)
    machine = cluster(2)
    program = asc.schedule(graph, replace(machine, imagined=True), costs=COSTS).program
    return graph, program, machine


@pytest.mark.parametrize("late", [False, True])
def test_a_task_that_raises_ends_the_run_of_all_ranks(late: bool) -> None:
    """Late: when the other rank has issued all its copies, which end when they are aborted."""

    def before() -> None:
        while late and len(over.world.issued[1]) < 2 + 3 * OPERATIONS:
            time.sleep(1e-3)

    graph, program, machine = failing(before)
    with playing(2, 1) as gpus:
        over = Cluster(program, graph, machine, gpus)
        inputs = {f"x{r}": torch.full((3,), float(r)) for r in range(2)}
        for _ in range(2):
            assert not any(isinstance(found, BaseException) for found in over.run(inputs))
        first, second = over.run(inputs)
        over.close()
    assert isinstance(first, asc.TaskError)
    assert f"task {graph.tasks[0].name!r}" in str(first)
    assert isinstance(second, asc.RankError), second
    assert "of a test" in str(second)


def test_a_sender_compares_shapes_before_it_sends() -> None:
    graph = ring(2)
    machine = cluster(2)
    program = asc.schedule(graph, replace(machine, imagined=True), costs=COSTS).program
    with playing(2, 1) as gpus:
        over = Cluster(program, graph, machine, gpus)
        over.run({f"x{r}": torch.ones(3) for r in range(2)})
        found = over.run({f"x{r}": torch.ones(4) for r in range(2)})
        over.close()
    assert any(isinstance(each, asc.ScheduleError) for each in found)
    assert all(isinstance(each, asc.AutoschedError) for each in found)


def test_a_rank_that_fails_before_it_makes_communicators_keeps_no_other_waiting() -> None:
    """NCCL waits forever, and what is made afterwards is aborted."""
    graph, program, machine = failing(lambda: None)
    with playing(2, 1) as gpus:
        over = Cluster(program, graph, machine, gpus)

        def call(rank: int) -> object:
            if rank == 0:
                return over.executors[0]({"x0": torch.ones(3, device="cuda:0")})
            with over.world.changed:
                over.world.changed.wait_for(lambda: over.world.made[0], PATIENCE)
            return over.sessions[1].give_up("rank", "rank 1 was interrupted")

        first, _ = over.each(call)
        assert isinstance(first, asc.RankError), first
        assert "rank 1 was interrupted" in str(first)
        assert "rank 0 waited: communicators of NCCL" in str(first)
        assert not over.world.aborted
        channel = over.world.made[0][0]
        with torch.cuda.device(1):
            over.world.connect(1)(channel)  # too late
        until(lambda: over.world.aborted == {0})
        over.close()


def test_a_wire_that_is_lost_at_once_is_not_replaced_within_the_run() -> None:
    graph, program, machine = failing(lambda: None)
    with playing(2, 1) as gpus:
        over = Cluster(program, graph, machine, gpus)
        session = over.sessions[0]
        asked = []

        def wire() -> HostWire:
            asked.append(session.own)
            over.sessions[1].give_up("rank", "rank 1 was interrupted")
            return session.own

        session.wire = wire  # type: ignore[method-assign]
        with pytest.raises(asc.RankError, match="rank 1 was interrupted"):
            over.executors[0]({"x0": torch.ones(3, device="cuda:0")})
        over.close()
    assert len(asked) == 1
    assert not over.world.made


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_a_rank_that_cannot_make_communicators_tells_the_others() -> None:
    graph = ring(2)
    machine = cluster(2)
    program = asc.schedule(graph, replace(machine, imagined=True), costs=COSTS).program

    def refuse(channel: Channel) -> Any:
        raise RuntimeError("NCCL error: no interface")

    with playing(2, 1) as gpus:
        over = Cluster(program, graph, machine, gpus)
        connect = over.world.connect
        over.world.connect = lambda gpu: refuse if gpu == 1 else connect(gpu)  # type: ignore
        found = over.run({f"x{r}": torch.ones(3) for r in range(2)})
        over.close()
    for error in found:
        assert isinstance(error, asc.RankError), error
        assert "rank 1 could not make communicators of NCCL: NCCL error: no inter" in str(error)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with playing(1) as gpus:
        world = World(gpus, [0, 0])
        (channel,) = channels([(0, 1)]).values()
        with pytest.raises(RuntimeError, match="Duplicate GPU"):
            world.connect(0)(channel)


# ---- the fake


def both(world: World) -> list[Any]:
    """Return for each of two ranks its communicators, of what it sends and what it receives."""
    found: list[Any] = [None, None]

    def make(rank: int) -> None:
        with torch.cuda.device(rank):
            made = [world.connect(rank)(at) for at in channels([(0, 1), (1, 0)]).values()]
        found[rank] = made if rank == 0 else made[::-1]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("crossed", [False, True])
def test_the_fake_notes_exchanges_in_different_orders(crossed: bool) -> None:
    with playing(2) as gpus:
        world = World(gpus, [0, 1])
        rows = [torch.zeros(1, device=f"cuda:{rank}") for rank in range(2)]
        (out, into), (back, found) = both(world)
        steps = [lambda: back.send(rows[1], 0).wait(), lambda: found.receive(rows[1], 0).wait()]
        out.send(rows[0], 1).wait()
        into.receive(rows[0], 1).wait()
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
