"""Issuing: threads that issue work one instruction after another, by hand and over any program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.jit import Mode
from autosched.bounds import bounds
from autosched.policies import POLICIES
from autosched.simulation.issuing import issuing
from autosched.simulation.simulate import durations, makespan, simulate
from autosched.simulation.simulate import times as predicted
from tests.simulation.test_simulate import LINKS
from tests.strategies import graphs, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
ISSUE = 3e-6


def slow_to_issue(
    machine: asc.Machine, issue: float, event: float = 0.0, streams: int | None = None
) -> asc.Machine:
    """Return the machine with these seconds to issue work to its devices."""
    devices = [
        dataclasses.replace(
            device,
            issue_seconds=issue,
            event_seconds=event,
            streams=device.streams if streams is None else streams,
        )
        for device in machine.devices
    ]
    return asc.Machine(devices, machine.links, contention=machine.contention, imagined=True)


HAND = slow_to_issue(
    asc.Machine([asc.Device("cpu"), asc.Device("cuda:0"), asc.Device("cuda:1")], LINKS), 1, 0.25
)


def tasks(*names: str, seconds: float = 1.0, after: dict[str, str] | None = None) -> asc.Graph:
    """Return a graph of tasks; each reads ``x``, or the result of the task that it comes after."""
    graph = asc.Graph()
    x = graph.input("x")
    made = {}
    for name in names:
        read = made[after[name]] if after and name in after else x
        made[name] = graph.add(int, read, name=name, seconds=seconds, nbytes=2)
    graph.output(**made)
    return graph


def times(graph: asc.Graph, text: str, costs: asc.Costs | None = None) -> dict[str, float]:
    """Return the start of each span of a program given as text."""
    program = asc.Program.parse(text)
    found = simulate(program, asc.Problem(graph, HAND, costs or asc.Costs()))
    return {span.name: span.start for span in found.spans}


# ---- by hand


def test_one_thread_issues_the_streams_of_all_accelerators_one_after_another():
    text = """
        cuda:0/compute run a
        cuda:0/compute1 run b
        cuda:1/compute run c
        cuda:0/compute run d
    """
    assert times(tasks(*"abcd", seconds=2.5), text) == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert times(tasks(*"abcd", seconds=5), text) == {"a": 1, "b": 2, "c": 3, "d": 6}


def test_records_waits_and_copies_keep_the_thread_busy_too():
    text = """
        input x on cuda:0
        cuda:0/compute run a
        cuda:0/compute record e0
        cuda:0/copy-out wait e0
        cuda:0/copy-out copy a -> cuda:1/copy-in
        cuda:0/compute run b
    """
    found = simulate(asc.Program.parse(text), asc.Problem(tasks(*"ab", seconds=0.5), HAND))
    assert [(span.kind, span.start) for span in found.spans] == [
        ("run", 1),
        ("copy", 2.5),
        ("run", 3.5),
    ]


def test_a_stream_that_waits_for_the_cpu_delays_no_other():
    """The thread of cuda:0 waits until the CPU has issued its record, after its task; cuda:1 has the calling thread."""
    text = """
        cpu/compute run a
        cpu/compute record e0
        cuda:0/compute wait e0
        cuda:0/compute run b
        cuda:1/compute run c
    """
    graph = tasks("a", "b", "c", seconds=7)
    assert times(graph, text) == {"a": 0, "b": 7 + 0.25 + 1, "c": 1}


def test_a_task_may_have_its_own_time_of_issue_and_launches_count():
    graph = tasks(*"abc")
    text = "cuda:0/compute run a\ncuda:0/compute1 run b\ncuda:1/compute run c"
    costs = asc.Costs(issue={"a": 4.0})
    assert times(graph, text, costs) == {"a": 4, "b": 5, "c": 6}
    graph = asc.Graph()
    graph.output(y=graph.add(int, graph.input("x"), name="a"))
    costs = asc.Costs(work={"a": asc.Work(0, 0, launches=3)})
    assert times(graph, "cuda:0/compute run a", costs) == {"a": 3}


def test_a_replayed_run_costs_a_constant_and_each_graph_and_node():
    """Both branches are one graph; the copy out cuts one that follows, and is issued as always."""
    costs = asc.Costs(replay=asc.Replay(call=10, graph=5, node=0.5))
    text = """
        cuda:0/compute run a
        cuda:0/compute record e0
        cuda:0/compute1 wait e0
        cuda:0/compute1 run b
        cuda:0/compute run c
    """
    graph = tasks(*"abc", after={"b": "a", "c": "a"})
    assert times(graph, text, costs) == {"a": 16.5, "b": 17.5, "c": 17.5}
    assert (
        bounds(asc.Problem(graph, asc.Machine(HAND.devices[1:], HAND.links[2:]), costs))["host"]
        == 16.5
    )
    text = """
        cuda:0/compute run a
        cuda:0/compute record e0
        cuda:0/copy-out wait e0
        cuda:0/copy-out copy a -> cpu
        cuda:0/compute run b
    """
    graph = tasks(*"ab", after={"b": "a"})
    found = simulate(asc.Program.parse(text), asc.Problem(graph, HAND, costs)).spans
    assert [span.start for span in found] == [10 + 5.5, 15.5 + 1.25, 16.75 + 5.5]


# ---- any program


def parts(graph, machine, policy="heft", costs=COSTS):
    made = asc.schedule(graph, machine, policy=policy, costs=costs)
    return made.program, asc.Problem(made.graph, machine, costs)


@given(graph=graphs(), machine=machines())
def test_threads_that_issue_in_no_time_change_nothing(graph, machine):
    """All threads are there, and the times of the classic model come out to the bit."""
    program, problem = parts(graph, machine)
    seconds = durations(program, problem)
    assert issuing(program, problem) is None
    slow = slow_to_issue(machine, 1.0)
    threads = issuing(program, asc.Problem(problem.graph, slow, COSTS))
    none = threads._replace(seconds=0 * threads.seconds)
    assert makespan(program, seconds, none) == makespan(program, seconds)


@given(graph=graphs(), machine=machines(), replay=st.sampled_from([None, asc.Replay()]))
def test_times_are_the_same_to_the_bit_where_they_are_compiled(graph, machine, replay):
    machine = slow_to_issue(machine, ISSUE, ISSUE / 5)
    costs = dataclasses.replace(COSTS, replay=replay)
    program, problem = parts(graph, machine, costs=costs)
    seconds = durations(program, problem)
    threads = issuing(program, problem)
    slow, fast = (predicted(program, seconds, threads, 2, Mode(how)) for how in (False, True))
    assert np.array_equal(slow, fast)
    assert makespan(program, seconds, threads) == simulate(program, problem).makespan


@given(graph=graphs(), machine=machines(), data=st.data())
def test_no_program_ends_before_a_bound_and_slower_threads_gain_nothing(graph, machine, data):
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    replay = data.draw(st.sampled_from([None, asc.Replay()]))
    issues = sorted(data.draw(st.lists(st.sampled_from([0.0, 1e-6, 4e-6, 3e-5]), min_size=2)))
    costs = dataclasses.replace(COSTS, replay=replay)
    program, problem = parts(graph, machine, policy, costs)
    own = problem.graph
    ends = [makespan(program, durations(program, asc.Problem(own, machine, COSTS)))]
    for issue in issues:
        slow = slow_to_issue(machine, issue, issue / 4)
        seconds = durations(program, asc.Problem(own, slow, costs))
        ends.append(makespan(program, seconds, issuing(program, asc.Problem(own, slow, costs))))
        found = bounds(asc.Problem(own, slow, costs))
        assert max(found.values()) <= ends[-1] * (1 + 1e-9), found
    assert ends == sorted(ends)
    made = asc.schedule(graph, slow, policy=policy, costs=costs)
    assert made.lower_bound * (1 - 1e-9) <= made.makespan <= made.serial_seconds * (1 + 1e-9)


def test_the_bound_knows_that_a_cpu_issues_nothing_and_that_streams_behind_it_have_threads():
    device = asc.Device("cuda:0", 2, issue_seconds=4)
    machine = asc.Machine([asc.Device("cpu"), device], LINKS[:1], imagined=True)
    graph = tasks("a", "b", "c", seconds=0.5, after={"b": "a", "c": "a"})
    text = """
        cpu/compute run a
        cpu/compute record e0
        cuda:0/compute wait e0
        cuda:0/compute run b
        cuda:0/compute1 wait e0
        cuda:0/compute1 run c
    """
    found = simulate(asc.Program.parse(text), asc.Problem(graph, machine))
    assert [span.end for span in found.spans] == [0.5, 5, 5]
    assert bounds(asc.Problem(graph, machine))["host"] <= 1.5  # all on the CPU
    costs = asc.Costs.table({"a": {"cpu": 0.5}, "b": {"cuda:0": 0.5}, "c": {"cuda:0": 0.5}})
    assert bounds(asc.Problem(graph, machine, costs))["host"] == pytest.approx(4)
    costs = asc.Costs.table({name: {"cuda:0": 0.5} for name in "abc"})
    assert bounds(asc.Problem(graph, machine, costs))["host"] == 3 * 4


# ---- many small kernels


def launch_bound(lanes: int = 8, depth: int = 3) -> asc.Graph:
    """Kernels of a microsecond, in lanes that exchange data at each step."""
    graph = asc.Graph("small kernels")
    values = list(graph.inputs(*(f"x{i}" for i in range(lanes))))
    for step in range(depth):
        values = [
            graph.add(int, value, values[i - 1], name=f"t{step}.{i}", seconds=1e-6)
            for i, value in enumerate(values)
        ]
    graph.output(**{f"y{i}": value for i, value in enumerate(values)})
    return graph


def gpu(streams: int, issue: float = 5e-6, event: float = 1e-6) -> asc.Machine:
    device = asc.Device("cuda:0", streams, issue_seconds=issue, event_seconds=event)
    return asc.Machine([device], [], imagined=True)


def test_many_small_kernels_take_no_less_than_issuing_them_and_auto_is_content_with_one_stream():
    graph = launch_bound()
    total = len(graph) * 5e-6
    one, eight = (asc.schedule(graph, gpu(streams), policy="heft") for streams in (1, 8))
    auto = asc.schedule(graph, gpu(8))
    assert len(eight.program.streams) == 8
    assert eight.makespan >= eight.lower_bound == pytest.approx(total)
    assert asc.schedule(graph, gpu(8, issue=0.0, event=0.0), policy="heft").makespan < total / 4
    assert total < auto.makespan <= one.makespan < eight.makespan
    assert auto.placement.streams == len(auto.program.streams) == 1
    assert len(asc.schedule(graph, gpu(8, issue=0.0, event=0.0)).program.streams) == 8


def test_replay_is_predicted_where_issuing_takes_time_and_pays_for_streams_again():
    graph = launch_bound()
    one, eight = (
        asc.schedule(graph, gpu(streams), policy="heft", replay=True, backend="replay")
        for streams in (1, 8)
    )
    assert eight.costs.replay == asc.Replay()
    assert eight.makespan < one.makespan < len(graph) * 5e-6
    classic = asc.schedule(graph, gpu(8, 0.0, 0.0), policy="heft", replay=True, backend="replay")
    assert classic.costs.replay is None
    own = asc.Costs(replay=asc.Replay(call=1.0))
    assert asc.schedule(graph, gpu(8), policy="heft", costs=own).makespan > 1


def test_the_limit_on_streams_is_saved_and_read_back(tmp_path):
    made = asc.schedule(launch_bound(2, 6), gpu(2))
    assert made.placement.streams == 1
    made.save(tmp_path / "saved.json")
    again = asc.load(tmp_path / "saved.json", made.graph)
    assert (again.placement, again.program) == (made.placement, made.program)
    assert again.makespan == made.makespan


def test_explain_says_that_the_host_bounds_and_that_replay_helps():
    found = asc.schedule(launch_bound(), gpu(8), policy="heft").explain()
    assert found.efficiency.bound == "host"
    assert found.path_seconds["host"] > found.makespan / 2
    assert any("the host bounds the run: one thread is busy for" in note for note in found.notes)
    replayed = next(advice for advice in found.advice if "replay CUDA graphs" in advice.words)
    assert replayed.makespan < found.makespan / 2
    free = asc.schedule(launch_bound(), gpu(8, 0.0, 0.0), policy="heft").explain()
    assert "the host bounds" not in str(free)
    assert "host" not in free.path_seconds


def test_costs_and_machines_with_issuing_are_saved_and_read_back():
    costs = asc.Costs(issue={"t0.0": 1e-6}, replay=asc.Replay(node=0.0))
    assert asc.Costs.from_json(costs.to_json()) == costs
    assert asc.Machine.from_json(gpu(2).to_json()) == gpu(2)
    assert "issue" not in asc.Costs().to_json()
    assert "issue" not in asc.Machine.emulated(gpus=1).to_json()
    assert gpu(2).slower(3).devices[0].issue_seconds == pytest.approx(15e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: asc.Replay(call=-1), "call of replay must be a number, 0 or more"),
        (lambda: asc.Costs(replay=3), "replay of costs must be Replay"),
        (lambda: asc.Costs(issue={"a": float("inf")}), "issue of 'a' must be a number"),
        (lambda: asc.Device("cuda:0", event_seconds=-1), "event_seconds of"),
    ],
)
def test_costs_of_issuing_that_are_no_numbers_are_refused(make, message):
    with pytest.raises(asc.AutoschedError, match=message):
        make()
