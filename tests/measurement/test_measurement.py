"""Measuring: which tasks are timed, how a device is fed meanwhile, what is believed, what is kept; links, streams."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched import measurement, simulated_gpus
from autosched.measurement import (
    machines,
    stopwatch,
    tasks,
)
from autosched.measurement.machines import fitted
from autosched.measurement.stopwatch import EventWatch, Reading, Stopwatch
from autosched.measurement.tasks import objection, run_serially, signature_of
from tests.sample_policies import placed
from tests.simulated_gpus.timing import Timing

HERE = asc.Machine.local(gpus=0)
PLAYED = asc.Machine(  # a machine whose GPUs are the CPU
    [asc.Device("cpu"), *(asc.Device(f"cuda:{i}", physical="cpu") for i in range(2))],
    [asc.Link("cpu", f"cuda:{i}", 1e9) for i in range(2)] + [asc.Link("cuda:0", "cuda:1", 1e9)],
)


def nap(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)
    return x + 1


def graph_on_gpus() -> tuple[asc.Graph, dict[str, torch.Tensor]]:
    """Return a graph that must run on GPUs, with a view, a write in place and a nap; and inputs for it."""
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:1"):
        rested = graph.add(nap, x, name="nap")
        x.mul_(2)
        graph.output(y=rested.T @ x)
    return graph, {"x": torch.ones(4, 4)}


def products(count: int) -> asc.Graph:
    """Return a graph of equal products of 8x8 matrices, one after another."""
    graph = asc.Graph()
    x = graph.input("x")
    y = x
    for _ in range(count):
        y = torch.matmul(y, x)
    graph.output(y=y)
    return graph


X = {"x": torch.eye(8)}


# ---- which tasks are timed


def test_tasks_are_timed_on_the_cpu_wherever_they_must_run() -> None:
    graph, inputs = graph_on_gpus()
    costs = asc.measure_costs(graph, HERE, inputs, repeat=2)
    assert list(costs.seconds) == ["nap", "mul", "matmul"]
    assert 0.001 <= costs.seconds["nap"] < 3
    assert costs.nbytes == {"x": 64, "nap": 64, "T": 64, "matmul": 64}
    assert torch.equal(inputs["x"], torch.ones(4, 4))  # what tasks write is a copy


def test_constants_stay_as_they_are() -> None:
    graph, weight = asc.Graph(), torch.nn.Parameter(torch.ones(2))
    w = graph.constant(weight, name="w")
    w.mul_(2)
    graph.output(y=w + 1)
    asc.measure_costs(graph, HERE, repeat=1)
    assert torch.equal(weight, torch.ones(2))


def counted(monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float] = ()) -> list[Reading]:
    """Return the readings that will be taken, which are as given, and then 1e-4 s each."""
    given, taken = iter(seconds), []

    def read(
        self: Stopwatch, calls: Sequence[Callable[[], Any]], ahead: float = 0.0
    ) -> tuple[Reading, Any]:
        each = next(given, 1e-4)
        taken.append(Reading(each, each))
        return taken[-1], [call() for call in calls][-1]

    monkeypatch.setattr(Stopwatch, "time", read)
    return taken


def test_what_does_the_same_work_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch, [1.0] * 5 + [0.002, 0.001, 0.003])  # the first run warms up
    costs = asc.measure_costs(products(5), HERE, X, repeat=3)
    assert len(taken) == 5 + 3
    assert set(costs.seconds.values()) == {0.002}
    assert len(costs.seconds) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.ones(2, 3), 1), (torch.ones(3, 2), 1)),
        ((torch.ones(2, 3), 1), (torch.ones(3, 2).T, 1)),
        ((torch.ones(2, 3), 1), (torch.ones(2, 3, dtype=torch.float64), 1)),
        ((torch.ones(2, 3), 1), (torch.ones(2, 3), 2)),
        ((torch.ones(2, 3), 1), (torch.ones(2, 3), True)),
        ((torch.ones(2, 3), [1, 2]), (torch.ones(2, 3), [1, 3])),
    ],
)
def test_what_may_be_other_work_has_another_shape(one: Any, other: Any) -> None:
    assert (
        signature_of(torch.add, one, {})
        != signature_of(torch.add, other, {})
        != signature_of(torch.sub, other, {})
    )
    assert signature_of(torch.add, one, {}) == signature_of(torch.add, one, {})


def test_each_kind_of_device_is_timed_on_its_first_and_counts_for_all() -> None:
    graph = asc.Graph()
    rested = graph.add(nap, graph.input("x"), name="nap")
    graph.output(
        sum=graph.add(torch.sum, rested.T, name="sum"),
        here=graph.add(abs, rested, name="here", on="cpu"),
        there=graph.add(abs, rested, name="there", on="cuda:1"),
        never=graph.add(abs, rested, name="never", seconds={"cpu": 0.01, "cuda:1": 2.0}),
        nor=graph.add(abs, rested, name="nor", seconds={"cpu": 0.01, "cuda:0": 2.0}),
    )
    seconds = asc.measure_costs(graph, PLAYED, {"x": torch.ones(4, 4)}, repeat=2).seconds
    assert list(seconds["nap"]) == list(seconds["sum"]) == list(PLAYED.names)
    assert 0.001 <= seconds["nap"]["cuda:0"] == seconds["nap"]["cuda:1"] < 3
    known = asc.Costs.estimate(graph, {"x": torch.ones(4, 4)})
    for task, device in [
        ("here", "cuda:0"),
        ("there", "cpu"),
    ]:  # where it cannot run it costs what was known
        assert seconds[task][device] == known.task_seconds(graph.task(task), PLAYED.device(device))
        assert seconds[task].keys() - {device} < set(PLAYED.names)
    assert seconds["here"]["cpu"] != known.task_seconds(graph.task("here"), PLAYED.device("cpu"))
    assert seconds["there"]["cuda:1"] != known.task_seconds(
        graph.task("there"), PLAYED.device("cuda:1")
    )
    assert seconds["never"]["cuda:0"] == seconds["nor"]["cuda:1"] == math.inf


def test_a_cpu_is_not_kept_busy_with_what_a_gpu_does_in_a_tenth_of_the_time() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    given = [("long", 0.05), ("short", 0.01), ("equal", 0.003)]
    for name, on_cpu in given:
        x = graph.add(abs, x, name=name, seconds={"cpu": on_cpu, "cuda:0": 0.001, "cuda:1": 0.002})
    graph.output(y=x)
    seconds = asc.measure_costs(graph, PLAYED, X, repeat=1).seconds
    assert [seconds[name]["cpu"] == on_cpu for name, on_cpu in given] == [True, False, False]


@pytest.mark.parametrize(
    ("serial", "streams", "share", "used"),
    [(0.0, 4, 1.0, 1), (1e-3, 4, 0.0, 4), (5e-4, 4, 0.5, 4), (5e-4, 2, 0.5, 2), (0.0, 1, None, 1)],
)
def test_a_cpu_with_streams_is_measured_with_all_threads_and_with_those_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, serial: float, streams: int, share: float | None, used: int
) -> None:
    """A task takes 1 ms with four threads; what is not serial takes longer with fewer.

    Eight tasks of which half is serial take 8 ms on one stream, and on four streams two times 2.5.
    """

    class Watch:
        def time(
            self, calls: Sequence[Callable[[], Any]], ahead: float = 0.0
        ) -> tuple[Reading, Any]:
            taken = serial + (1e-3 - serial) * 4 / torch.get_num_threads()
            return Reading(taken, taken), [call() for call in calls][-1]

    monkeypatch.setattr(tasks, "stopwatch", lambda device: Watch())
    machine = asc.Machine.local(gpus=0, cpu_streams=streams)
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(*(graph.add(torch.mul, x, x + i, name=f"t{i}") for i in range(8)))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        costs = asc.measure_costs(graph, machine, {"x": torch.ones(300, 300)}, repeat=2)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert costs.seconds["t0"] == 1e-3
    found = costs.shares.get("t0")
    assert found == (None if share is None else {"cpu": pytest.approx(share)})
    made = asc.schedule(graph, machine, costs=costs)
    computing = {s for s in made.program.streams if s.name.startswith("compute")}
    assert len(computing) == used
    assert asc.Costs.from_json(costs.to_json()) == costs


def test_merged_tasks_are_measured_whole() -> None:
    graph = asc.merge(products(4), {"matmul": "pair", "matmul_1": "pair"})
    costs = asc.measure_costs(graph, HERE, X, repeat=2)
    assert sorted(costs.seconds) == sorted(task.name for task in graph.tasks)
    assert "pair" in costs.seconds


def test_an_emulated_machine_is_not_measured() -> None:
    with pytest.raises(asc.MachineError, match="an emulated machine has nothing to measure"):
        asc.measure_costs(asc.Graph(), asc.Machine.emulated(gpus=1))
    with pytest.raises(asc.MachineError, match="an emulated machine has nothing to measure"):
        asc.measure_machine(asc.Machine.emulated(gpus=1))


def test_a_machine_of_several_ranks_is_not_measured() -> None:
    devices = [asc.Device(f"cpu:{rank}", rank=rank, host="a") for rank in range(2)]
    with pytest.raises(
        asc.MachineError, match=r"give the figures of its network to Machine\.cluster"
    ):
        asc.measure_machine(asc.Machine(devices, network=asc.Network(1e9)))


def test_what_is_no_count_is_refused() -> None:
    for measure in (
        lambda **options: asc.measure_costs(products(1), HERE, X, **options),
        lambda **options: asc.measure_machine(HERE, **options),
    ):
        with pytest.raises(
            asc.ScheduleError, match="repeat must be a whole number, 1 or more, got 0"
        ):
            measure(repeat=0)


def test_a_task_without_a_function_is_named() -> None:
    networkx = pytest.importorskip("networkx")
    graph = asc.Graph.from_networkx(networkx.DiGraph([("a", "b")]))
    with pytest.raises(
        asc.ScheduleError, match="task 'a' has no function: it can be planned, not measured"
    ):
        asc.measure_costs(graph, HERE)


def test_a_task_that_fails_is_named() -> None:
    graph = asc.Graph()
    graph.output(y=graph.add(torch.mm, graph.input("x"), 1, name="odd"))
    with pytest.raises(TypeError) as raised:
        asc.measure_costs(graph, HERE, X)
    assert raised.value.__notes__[0].startswith("in task 'odd', added at")


def test_random_numbers_are_drawn_again_afterwards() -> None:
    graph = asc.Graph()
    graph.output(y=graph.add(torch.rand_like, graph.input("x"), random=True))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    asc.measure_costs(graph, HERE, X)
    assert torch.equal(torch.rand(2), expected)


# ---- serial runs

CPU, ELSEWHERE = (
    torch.device("cpu"),
    torch.device("cpu", 0),
)  # for torch these are two, and it copies between them


def test_what_must_run_elsewhere_runs_there_on_copies_and_what_it_writes_comes_back() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    seen = x[:1]
    graph.add(lambda x: x.add_(1), x, writes=[x], name="write")
    graph.output(y=graph.add(lambda x, seen: x * seen, x, seen, name="read"))
    pointers: dict[str, int] = {}
    results: dict[str, Any] = {}

    def do(task: asc.Task, args: Any, kwargs: Any, where: torch.device) -> Any:
        pointers[task.name] = args[0].data_ptr()
        results[task.name] = task.fn(*args, **kwargs) if task.fn else None
        return results[task.name]

    inputs = {"x": torch.ones(2)}
    run_serially(graph, inputs, CPU, lambda task: ELSEWHERE if task.name == "write" else CPU, do)
    assert pointers["write"] != pointers["read"]
    assert results["read"].tolist() == [4, 4]
    assert inputs["x"].tolist() == [1, 1]


# ---- accepted readings


@pytest.mark.parametrize("odd", [0.0, -1e-6, math.nan, math.inf, 1e-15])
def test_a_reading_that_cannot_be_is_taken_again(
    monkeypatch: pytest.MonkeyPatch, odd: float
) -> None:
    taken = counted(monkeypatch, [1e-4, odd, odd, odd])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asc.measure_costs(products(1), HERE, X, repeat=3).seconds == {"matmul": 1e-4}
    assert len(taken) == 1 + 3 + 3


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (0.0, "took 0 s on cpu, which is no time for work"),
        (-1e-6, "took -1e-06 s on cpu, which is no time"),
        (math.nan, "took nan s on cpu, which is no time"),
        (1e-15, "took 1e-15 s on cpu, which would be 512,000 times the peak"),
    ],
)
def test_what_cannot_be_twice_is_left_as_it_was_known(
    monkeypatch: pytest.MonkeyPatch, odd: float, why: str
) -> None:
    counted(monkeypatch, [odd] * 9)
    with pytest.warns(
        UserWarning, match=f"task 'matmul' {re.escape(why)}.*; it is left as estimated"
    ):
        costs = asc.measure_costs(products(1), HERE, X, repeat=3)
    assert costs.seconds == {}
    assert costs.work["matmul"].flops == 2 * 8**3


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.floats(1e-9, 1e3), st.floats(1, 1e3))
def test_what_a_device_can_do_it_can_do_slower(
    flops: float, nbytes: float, seconds: float, factor: float
) -> None:
    work, gpu = asc.Work(flops, nbytes), asc.Device("cuda:0")
    if objection(seconds, work, gpu) is None:
        assert objection(seconds * factor, work, gpu) is None
    assert objection(work.seconds(gpu), work, gpu) is None


# ---- a device that is fed by a host


class Gpu:
    """A GPU of one stream, and the clock of the host that feeds it. Events take a microsecond of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sleeps: bool = True):
        self.now = self.free = 0.0
        gpu = self

        class Event:
            def __init__(self, device: Any, enable_timing: bool):
                assert enable_timing

            def record(self, stream: Any) -> None:
                gpu.launch(0.0, 1e-6)
                self.at = gpu.free

            def query(self) -> bool:
                return self.at <= gpu.now

            def synchronize(self) -> None:
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) * 1e3

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(1e-6, cycles * 5e-10))
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(stopwatch, "_cycles", {})
        self.watch = EventWatch(torch.device("cuda" if sleeps else "xpu", 0))

    def launch(self, issue: float, seconds: float) -> None:
        self.now += issue
        self.free = max(self.free, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.free)


def test_a_device_that_sleeps_meanwhile_tells_what_kernels_take_and_the_host_what_launching_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    starved, _ = gpu.watch.time([lambda: gpu.launch(2e-5, 3e-6)])
    fed, returned = gpu.watch.time([lambda: gpu.launch(2e-5, 3e-6) or "done"] * 4, ahead=1e-4)
    assert starved.seconds == pytest.approx(2.2e-5)
    assert (fed.seconds, fed.issued, fed.clean) == (pytest.approx(3e-6), pytest.approx(2e-5), True)
    assert returned == "done"


def test_a_call_that_waits_for_its_device_is_not_timed_behind_a_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)

    def item() -> None:
        gpu.launch(5e-6, 2e-6)
        gpu.wait()

    assert not gpu.watch.time([item], 1e-3)[0].clean
    assert gpu.watch.time([item])[0].clean


def ramping(monkeypatch: pytest.MonkeyPatch, gpus: Any, timing: Any) -> EventWatch:
    """Return the stopwatch of a simulated GPU whose clock rises while it is busy."""
    gpus.timing = timing
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: timing.host))
    monkeypatch.setattr(stopwatch, "_cycles", {})
    return EventWatch(torch.device("cuda", 0))


def test_the_sleep_is_calibrated_when_the_clock_no_longer_rises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated_gpus.playing(seed=1) as gpus:
        timing = Timing(issue=2e-5)
        watch = ramping(monkeypatch, gpus, timing)
        assert 1 / watch.cycle == pytest.approx(timing.busy_rate, rel=0.02)
        x = torch.ones(3, device="cuda:0")
        reading, _ = watch.time([lambda: x + 1] * 20, ahead=8e-4)
        assert reading.clean
        assert reading.seconds == pytest.approx(timing.kernel, rel=0.1)


def test_where_torch_has_no_sleep_a_device_is_timed_as_it_is_fed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, sleeps=False)
    reading, _ = gpu.watch.time([lambda: gpu.launch(2e-5, 3e-6)], ahead=1e-4)
    assert (reading.seconds, reading.clean) == (pytest.approx(2.2e-5), True)


@pytest.mark.parametrize(
    ("replay", "issue", "small"), [(False, 0.0, 2e-5), (True, 0.0, 3e-6), (False, 1e-6, 3e-6)]
)
def test_tasks_on_a_gpu_take_what_kernels_take_or_what_launching_them_does(
    monkeypatch: pytest.MonkeyPatch, replay: bool, issue: float, small: float
) -> None:
    """What launching takes is told apart from the kernels where the machine knows of issuing."""
    gpu = Gpu(monkeypatch)
    calls: list[str] = []

    def kernel(name: str, seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def launched(x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                calls.append(name)
                gpu.launch(2e-5, seconds)
                if name == "item":
                    gpu.wait()
            return x + 0

        return launched

    graph = asc.Graph()
    x = graph.input("x")
    for name, seconds in [("large", 1e-3), ("small", 3e-6), ("item", 3e-6)]:
        x = graph.add(kernel(name, seconds), x, name=name)
    graph.add(lambda x: kernel("write", 3e-6)(x) and None, x, writes=[x], name="write")
    graph.output(y=x)
    monkeypatch.setattr("autosched.measurement.tasks.stopwatch", lambda device: gpu.watch)
    monkeypatch.setattr(tasks, "_device_groups", lambda machine: [machine.devices[1:]])
    monkeypatch.setattr(
        tasks.Bench, "device", property(lambda self: CPU, lambda self, _: None), raising=False
    )
    devices = [dataclasses.replace(device, issue_seconds=issue) for device in PLAYED.devices]
    machine = asc.Machine(devices, PLAYED.links)
    costs = asc.measure_costs(graph, machine, {"x": torch.ones(1)}, repeat=4, replay=replay)
    assert {name: table["cuda:0"] for name, table in costs.seconds.items()} == pytest.approx(
        {"large": 1e-3, "small": small, "item": 2.5e-5, "write": small}, rel=0.2
    )
    launched = {"large": 2e-5, "small": 2e-5, "item": 2.3e-5, "write": 2e-5}
    assert costs.issue == (pytest.approx(launched, rel=0.2) if issue else {})


# ---- links


@given(st.floats(1e3, 1e12), st.floats(0, 1e-2))
def test_a_line_is_found_again(rate: float, latency: float) -> None:
    found = fitted({size: latency + size / rate for size in machines.SIZES})
    assert found is not None
    assert found[0] == pytest.approx(rate, rel=1e-3)
    assert found[1] == pytest.approx(latency, rel=1e-3, abs=1e-6 * (1 + 1e9 / rate))


@pytest.mark.parametrize(
    "odd", [{1: 1.0, 10: 1.0, 100: 1.0}, {1: 1.0}, {}, {1: 0.0, 2: 1.0}, {1: math.nan, 2: 1.0}]
)
def test_times_that_show_no_rate_give_none(odd: dict[int, float]) -> None:
    assert fitted(odd) is None


def played_links(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, str, bool, int], float]
) -> asc.Machine:
    """Return a machine of a CPU and two GPUs, on which copies take these seconds."""

    def copies(source: Any, destination: Any, pinned: bool, repeat: int, nbytes: int) -> float:
        return seconds(str(source), str(destination), pinned, nbytes)

    monkeypatch.setattr(machines, "_copies", copies)
    machine = asc.Machine.emulated(gpus=2)
    return asc.Machine(machine.devices, machine.links)


def test_a_link_is_as_fast_as_the_slower_way_and_pageable_memory_has_a_rate_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = set()

    def seconds(source: str, destination: str, pinned: bool, nbytes: int) -> float:
        asked.add((source, destination, pinned))
        rate = (
            40e9
            if "cpu" not in (source, destination)
            else 8e9
            if not pinned
            else 20e9
            if source == "cpu"
            else 16e9
        )
        return 4e-6 + nbytes / rate

    machine = played_links(monkeypatch, seconds)
    made = measurement.measured_links(machine).links
    found = [
        (link.bytes_per_second, link.latency, link.pageable_bytes_per_second or 0) for link in made
    ]
    assert found[0] == found[1] == pytest.approx((16e9, 4e-6, 8e9))
    assert found[2] == pytest.approx((40e9, 4e-6, 0))
    assert len(asked) == 4 + 4 + 2


@pytest.mark.parametrize(
    ("taken", "what"), [(lambda n: 1e-5, "no rate"), (lambda n: 1.0 + n, "1 bytes per second")]
)
def test_a_rate_that_no_link_has_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, taken: Callable[[int], float], what: str
) -> None:
    machine = played_links(monkeypatch, lambda source, destination, pinned, nbytes: taken(nbytes))
    with pytest.warns(
        UserWarning, match=f"copies between 'c.*' and 'cuda:.' show {what}.*; it stays as it was"
    ):
        assert measurement.measured_links(machine) == machine


def test_copies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "SIZES", (1 << 10, 1 << 20))
    timed, copies = [], machines._copies

    def watched(*arguments: Any) -> float:
        seconds = copies(*arguments)
        timed.append((*arguments, seconds))
        return seconds

    monkeypatch.setattr(machines, "_copies", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two sizes need not show a rate
        measurement.measured_links(PLAYED, repeat=1)
    assert [str(source) for source, *_ in timed[:2]] == ["cpu", "cpu"]
    assert {nbytes for *_, nbytes, _ in timed} == {1 << 10, 1 << 20}
    assert all(0 < seconds < 1 for *_, seconds in timed)


# ---- where there are GPUs


def test_on_played_gpus_all_is_measured_and_nothing_is_touched_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = pytest.importorskip("autosched.simulated_gpus", reason="needs GPUs that are played")
    monkeypatch.setattr(machines, "SIZES", (1 << 10, 1 << 14, 1 << 18))
    monkeypatch.setattr(stopwatch, "_SLEEPS", 2)
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    y = x @ w
    x.mul_(2)
    graph.add(lambda y: y.sum().item(), y, name="item")
    there = graph.add(torch.relu, y, name="there", on="cpu")
    graph.output(y=graph.add(torch.add, there, 1, on="cuda:1", name="last"))
    with played.playing(gpus=1, seed=5), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is played is slow
        machine = asc.Machine.local(gpus=2)
        inputs = {"x": torch.ones(8, 8), "w": torch.ones(8, 8, device="cuda:0")}
        costs = asc.measure_costs(graph, machine, inputs, repeat=2, replay=True)
        made = asc.measure_machine(machine, repeat=1)
        with asc.schedule(graph, made, costs=costs, inputs={"w": "cuda:0"}) as schedule:
            timeline = schedule.profile(**inputs)
    assert list(costs.seconds) == ["matmul", "mul", "item", "there", "last"]
    assert list(costs.seconds["matmul"]) == list(machine.names)
    assert all(
        0 <= seconds < math.inf for table in costs.seconds.values() for seconds in table.values()
    )
    assert inputs["x"].sum() == 64 * 2  # by the profile alone
    assert all(0 < made.device(name).issue_seconds < 1 for name in made.accelerators)
    assert all(0 < made.device(name).event_seconds < 1 for name in made.accelerators)
    assert 0 < timeline.doubt < 1


@pytest.mark.cuda
def test_each_kind_of_device_has_costs_and_links_have_rates() -> None:
    machine = asc.measure_machine(asc.Machine.local(gpus=2), repeat=3)
    for link in machine.links:
        assert 1e8 < link.bytes_per_second < 1e13
        assert 0 <= link.latency < 1e-2
    assert all(1 <= machine.device(name).streams <= 8 for name in machine.accelerators)
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    graph.output(y=x @ w + 1)
    inputs = {"x": torch.ones(512, 512), "w": torch.ones(512, 512)}
    launched, alone = (
        asc.measure_costs(graph, machine, inputs, repeat=3, replay=replay)
        for replay in (False, True)
    )
    assert list(launched.seconds["matmul"]) == list(machine.names)
    gpus = machine.accelerators
    assert 0 < alone.seconds["matmul"][gpus[0]] == alone.seconds["matmul"][gpus[1]] < 0.1
    assert alone.seconds["add"][gpus[0]] <= launched.seconds["add"][gpus[0]] * 1.5


@pytest.mark.cuda
def test_a_gpu_s_products_take_what_they_take_in_a_row() -> None:
    machine = asc.Machine.local(gpus=1)
    name = machine.accelerators[0]
    x = torch.rand(2048, 2048) * (2 / 2048)  # zeros take less time
    there = x.to(name)
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:  # the clock of a GPU at rest is slow
        there.mm(there)
        torch.accelerator.synchronize()
    costs = asc.measure_costs(products(8), machine, {"x": x}, replay=True)
    graph = products(8)
    with asc.schedule(graph, machine, inputs=name, costs=costs, policy=placed(name)) as schedule:
        times = []
        for _ in range(12):
            begun = time.perf_counter()
            schedule(x=there)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begun)
    assert 0.8 < schedule.makespan / statistics.median(times[3:]) < 1.25
