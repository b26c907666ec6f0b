"""Profiles: repeated runs and their median, one accelerator, and what is learnt."""

import math
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.costs.learning import learn
from autosched.errors import TimelineError
from autosched.machine.machine import Device, Link
from autosched.program.program import Stream
from autosched.runtime.backends import accelerator
from autosched.runtime.backends.accelerator import Accelerator, DeviceClock
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.virtual import Virtual
from autosched.timeline.timeline import Span, Timeline

CPU = Stream("cpu", "compute")
A, B = Stream("cuda:0", "compute"), Stream("cuda:1", "compute")
TWO_GPUS = asc.Machine.emulated(gpus=2)


def run(name, start, end, i=0, stream=CPU):
    return Span("run", name, (stream,), start, end, i)


def one_task(fn, **kwargs):
    graph = asc.Graph()
    graph.output(y=graph.add(fn, graph.input("x"), name="t"))
    return asc.schedule(graph, asc.Machine.emulated(gpus=0), **{"backend": "host", **kwargs})


def two_branches():
    """Two chains that cross over between two devices."""
    graph = asc.Graph()
    x = graph.input("x")
    left, right = (
        graph.add(torch.add, x, 1, name="a", on="cuda:0"),
        graph.add(torch.add, x, 2, name="b", on="cuda:1"),
    )
    top, low = (
        graph.add(torch.add, left, right, name="c", on="cuda:0"),
        graph.add(torch.mul, left, right, name="d"),
    )
    graph.output(y=graph.add(torch.sub, top, low, name="e", on="cuda:1"))
    return graph


# ---- repeating


@pytest.mark.parametrize(("repeat", "warmup"), [(1, 0), (3, 0), (2, 3)])
def test_a_profile_runs_as_often_as_it_is_told_and_keeps_what_counts(repeat, warmup):
    calls = []
    with one_task(lambda x: calls.append(x)) as schedule:
        timeline = schedule.profile(repeat=repeat, warmup=warmup, x=1)
    assert len(calls) == repeat + warmup
    assert len(timeline.runs) == (repeat if repeat > 1 else 0)


@pytest.mark.parametrize("word", ["repeat", "warmup"])
@pytest.mark.parametrize("count", [-1, 1.5, "2", True, None])
def test_a_count_that_is_none_is_refused(word, count):
    with (
        one_task(abs) as schedule,
        pytest.raises(asc.ScheduleError, match=f"{word} must be a whole number, . or more"),
    ):
        schedule.profile(x=1, **{word: count})


# ---- medians

LENGTHS = st.floats(0, 1e6)


@given(st.lists(st.lists(LENGTHS, min_size=9, max_size=9), min_size=1, max_size=6))
def test_a_median_keeps_every_order_that_all_runs_keep(lengths):
    runs = []
    for gaps in lengths:
        moments = [sum(gaps[: n + 1]) for n in range(8)]
        spans = [
            run("a", moments[0], moments[1], 0, A),
            run("b", moments[1], moments[4], 1, A),
            run("c", moments[2], moments[3], 3, B),
            run("d", moments[6], moments[7], 5, B),
        ]
        runs.append(Timeline.of(spans, [(0, 3), (1, 5)]))
    median = Timeline.median(runs)
    a, b, c, d = sorted(median.spans, key=lambda span: span.instruction)
    assert all(span.start <= span.end for span in median.spans)
    assert a.end <= b.start <= b.end <= d.start
    assert a.end <= c.start <= c.end <= d.start
    assert {(median.spans[i].name, median.spans[j].name) for i, j in median.arrows} == {
        ("a", "c"),
        ("b", "d"),
    }
    ends = [next(span.end for span in timeline.spans if span.name == "a") for timeline in runs]
    assert a.end == statistics.median(ends)


def test_runs_of_different_programs_have_no_median():
    with pytest.raises(TimelineError, match="of different programs"):
        Timeline.median([Timeline((run("a", 0, 1),)), Timeline((run("b", 0, 1),))])
    with pytest.raises(TimelineError, match="no timelines"):
        Timeline.median([])


# ---- one clock


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_on_one_clock_nothing_begins_before_what_it_waited_for(backend):
    with asc.schedule(
        two_branches(), TWO_GPUS, costs=asc.Costs(default_seconds=1e-4), backend=backend
    ) as schedule:
        timeline = schedule.profile(repeat=3, x=torch.ones(8))
    assert timeline.arrows
    for line in (timeline, *timeline.runs):
        assert all(0 <= span.start <= span.end for span in line.spans)
        assert all(line.spans[a].end <= line.spans[b].start for a, b in line.arrows)


class Played:
    """A host's clock that a test moves, and a device's beside it: 1000 s ahead, of a rate of its own, seen late."""

    def __init__(self, monkeypatch, rate=1.0):
        played = self
        self.now, self.rate = 0.0, rate
        self.late = iter(
            ()
        )  # seconds until the host sees the next tick; the device ticks half of that before

        class Event:
            def __init__(self, device, enable_timing):
                assert enable_timing
                self.device = device

            def record(self, stream):
                wait = next(played.late, 0.0)
                played.now += wait / 2
                self.at = played.own(played.now)
                played.now += wait / 2

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        self.event = Event
        monkeypatch.setattr(accelerator, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)

    def own(self, now):
        return 1000 + now * self.rate

    def stamp(self, now):
        made = self.event("gpu", enable_timing=True)
        made.at = self.own(now)
        return made


def test_a_device_s_clock_is_told_by_the_tick_that_the_host_saw_best(monkeypatch):
    played = Played(monkeypatch)
    played.late = iter([9.0, 1.0, 8.0])
    backend = Accelerator()
    backend.callers = {"gpu": SimpleNamespace(device="gpu")}
    backend._zero()
    backend.begun = played.now
    assert backend.seconds(played.stamp(played.now + 2.5)) == pytest.approx(2.5)
    assert backend.doubt == 0.5


@pytest.mark.parametrize("rate", [1.0, 1.0005, 0.9995, 1.1])
def test_what_the_clocks_are_apart_after_a_run_is_a_doubt(monkeypatch, rate):
    played = Played(monkeypatch, rate)
    played.late = iter([1e-4] * 6)
    watch = DeviceClock(SimpleNamespace(device="gpu"))
    began, played.now = played.now, played.now + 100.0
    watch.end()
    for moment in (began, began + 50, began + 100):
        assert abs(watch.seconds(played.stamp(moment)) - moment) <= watch.doubt + 1e-9
    assert watch.doubt <= 100.1 * abs(rate - 1) + 1e-3


def test_a_profile_says_how_far_its_clocks_may_be_apart():
    class Doubtful(Host):
        doubt = 0.25

    with one_task(abs, backend=Doubtful()) as schedule:
        assert schedule.profile(x=1).doubt == schedule.profile(x=1, repeat=2).doubt == 0.25
    with one_task(abs) as schedule:
        assert schedule.profile(x=1).doubt == 0


@pytest.mark.cuda
def test_host_and_accelerator_share_a_clock():
    machine = asc.Machine.local(gpus=1)
    name = machine.accelerators[0]
    graph = asc.Graph()
    x = graph.input("x")
    for i in range(4):
        x = graph.add(torch.matmul, x, x, name=f"gpu{i}", on=name)
        x = graph.add(torch.tanh, x, name=f"cpu{i}", on="cpu")
    graph.output(y=x)
    with asc.schedule(graph, machine) as schedule:
        timeline = schedule.profile(repeat=5, warmup=2, x=torch.ones(512, 512))
        assert not schedule._executor.backend.timing
    assert 0 < timeline.doubt < 1e-3
    assert all(span.start >= -timeline.doubt for span in timeline.spans)
    apart = 2 * timeline.doubt
    assert all(
        run.spans[a].end <= run.spans[b].start + apart
        for run in timeline.runs
        for a, b in run.arrows
    )


# ---- bytes


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_copies_carry_the_bytes_that_were_moved(backend):
    graph = asc.Graph()
    graph.output(y=graph.add(lambda pair: pair[0] + 1, graph.input("x"), name="t", on="cuda:0"))
    with asc.schedule(
        graph, TWO_GPUS, costs=asc.Costs(default_nbytes=7), backend=backend, outputs="cpu"
    ) as schedule:
        timeline = schedule.profile(
            x=(torch.ones(8), [torch.ones(2, dtype=torch.float64), "no tensor"])
        )
        assert [span.nbytes for span in schedule.simulate().spans if span.kind == "copy"] == [7, 7]
    moved = {span.name: span.nbytes for span in timeline.spans if span.kind == "copy"}
    assert moved == {"x": 8 * 4 + 2 * 8, "t": 8 * 4}
    assert timeline.costs().nbytes == moved


# ---- learning


def learnt(seconds, measured, stream=A, machine=TWO_GPUS):
    graph = asc.Graph()
    graph.output(y=graph.add(abs, graph.input("x"), name="t"))
    timeline = Timeline((run("t", 1, 1 + measured, 0, stream),))
    costs = learn(timeline, graph, machine, asc.Costs.table({"t": seconds}))
    costs.check(graph)
    return [costs.task_seconds(graph.task("t"), device) for device in machine.devices]


@pytest.mark.parametrize(
    ("known", "measured", "on", "now"),
    [
        (
            {"cpu": 6, "cuda:0": 2, "cuda:1": 2},
            4.0,
            A,
            [12, 4, 4],
        ),  # a GPU stays three times as fast
        ({"cpu": 6, "cuda:0": 2, "cuda:1": 2}, 3.0, CPU, [3, 1, 1]),
        (
            {"cpu": 6, "cuda:0": 2, "cuda:1": 1},
            4.0,
            A,
            [12, 4, 4],
        ),  # equal devices take equally long
        (1.0, 4.0, A, [4, 4, 4]),
        ({"cuda:0": 2}, 4.0, A, [math.inf, 4, math.inf]),  # where it cannot run it still cannot
        ({"cpu": 6, "cuda:0": 0, "cuda:1": 0}, 4.0, A, [4, 4, 4]),  # nothing was known of speeds
        ({"cpu": 0, "cuda:0": 2, "cuda:1": 2}, 4.0, A, [4, 4, 4]),
        ({"cpu": 1e300, "cuda:0": 1e-300, "cuda:1": 2}, 4.0, A, [4, 4, 4]),
        ({"cpu": 6, "cuda:0": 2, "cuda:1": 2}, 0.0, A, [6, 2, 2]),  # not believed
        ({"cpu": 6, "cuda:0": 2, "cuda:1": 2}, -4.0, A, [6, 2, 2]),
        ({"cpu": 6, "cuda:0": 2, "cuda:1": 2}, math.nan, A, [6, 2, 2]),
        ({"cpu": 6, "cuda:0": 2, "cuda:1": 2}, math.inf, A, [6, 2, 2]),
    ],
)
def test_what_is_learnt_of_one_device_is_carried_over_to_the_others(known, measured, on, now):
    assert learnt(known, measured, on) == now


def test_devices_are_equal_if_all_but_their_names_is():
    devices = [
        Device("cuda:0", physical="cuda:0"),
        Device("cuda:1", physical="cuda:7"),
        Device("cuda:2", streams=2),
    ]
    links = [Link(a.name, b.name, 1e9) for a in devices for b in devices if a.name < b.name]
    machine = asc.Machine(devices, links)
    assert learnt({"cuda:0": 1, "cuda:1": 3, "cuda:2": 3}, 2.0, A, machine) == [2, 2, 6]


def test_views_stay_free_and_merged_tasks_are_learnt_by_their_own_name():
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x.t() + 1) * 2)
    for written, names in (
        (graph, ["add", "mul"]),
        (asc.merge(graph, {"add": "both", "mul": "both"}), ["both"]),
    ):
        with asc.schedule(written, asc.Machine.emulated(gpus=0), backend="host") as schedule:
            costs = schedule.profile(x=torch.ones(2, 2)).costs()
        costs.check(written)
        assert sorted(costs.seconds) == names


def test_plans_that_learn_from_all_profiles_reach_the_best_and_stay_there():
    """A GPU that is taken to be as fast as the CPU is slower at some tasks and faster at others, in virtual time.

    Whoever forgets what was measured on one device when a task moves to the other plans 3.5 and 6.5
    s in turn, forever.
    """
    graph, machine = asc.Graph(), asc.Machine.emulated(gpus=1, bytes_per_second=math.inf, latency=0)
    x = graph.input("x")
    graph.output(*[graph.add(torch.relu, x, name=f"t{i}") for i in range(6)])
    names = [task.name for task in graph.tasks]
    known = asc.Costs(default_seconds=1.0)
    truth = asc.Costs.table(
        {name: {"cpu": 1.0, "cuda:0": 3.0 if i < 3 else 0.25} for i, name in enumerate(names)}
    )
    profiles, makespans, costs = [], [], known
    for _ in range(4):
        placed = asc.schedule(graph, machine, costs=costs, policy="heft", backend="virtual")
        with replace(
            placed, problem=replace(placed.problem, costs=truth), backend=Virtual()
        ) as real:
            profiles.append(replace(real.profile(x=torch.ones(2)), learn=None))
        makespans.append(profiles[-1].makespan)
        costs = learn(profiles, graph, machine, known)
    assert makespans == pytest.approx([3.5, 6.5, 3.0, 3.0])


def test_what_is_behind_a_host_read_is_learnt():
    """No shape is known behind ``.item()``, so there nothing can be estimated."""

    def slow(x, scale):
        time.sleep(0.02)
        return x * scale

    graph = asc.Graph()
    x = graph.input("x")
    scale = graph.add(lambda x: x.sum().item(), x, name="scale", on="host")
    graph.output(y=graph.add(slow, x, scale, name="slow"))
    with pytest.warns(UserWarning, match="no estimate for 'scale'"):
        first = asc.schedule(graph, asc.Machine.emulated(gpus=0), examples={"x": torch.ones(8)})
    with first:
        costs = first.profile(x=torch.ones(8)).costs()
    assert first.makespan < 1e-3
    assert asc.schedule(graph, first.machine, costs=costs).makespan > 0.02


def test_a_prediction_gives_back_what_it_was_predicted_from():
    schedule = one_task(abs, costs=asc.Costs.table({"t": 2.0}))
    assert schedule.simulate().costs() is schedule.costs


def test_a_timeline_of_unknown_origin_has_no_costs():
    with pytest.raises(TimelineError, match="does not know what it was measured of"):
        Timeline((run("t", 0, 1),)).costs()
