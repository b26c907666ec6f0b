"""Simulate: timelines worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.simulation.simulate import durations, simulate

# A link that moves a byte in a second, after half a second.
LINKS = [
    asc.Link("cpu", "cuda:0", 1, 0.5),
    asc.Link("cpu", "cuda:1", 1, 0.5),
    asc.Link("cuda:0", "cuda:1", 1, 0.5),
]
DEVICES = [asc.Device("cpu"), asc.Device("cuda:0"), asc.Device("cuda:1")]
MACHINE = asc.Machine(DEVICES, LINKS)


def timeline(graph, text, costs=None, machine=MACHINE):
    """Simulate a program given as text; return its spans as (name, start, end)."""
    program = asc.Program.parse(text)
    asc.verify(program, graph)
    found = simulate(program, asc.Problem(graph, machine, costs or asc.Costs()))
    return [(span.name, span.start, span.end) for span in found.spans], found


def chain(*tasks, start="x", nbytes=2):
    """Return a graph of tasks (name, seconds) of which each reads the one before."""
    graph = asc.Graph()
    value = graph.input(start)
    for name, seconds in tasks:
        value = graph.add(int, value, name=name, seconds=seconds, nbytes=nbytes)
    graph.output(value)
    return graph


def test_a_reader_on_another_device_waits_for_the_copy():
    """The copy of a takes half a second and two more for two bytes; what waits says so by arrows."""
    spans, found = timeline(
        chain(("a", 1), ("b", 4)),
        """
        input x on cuda:0
        cuda:0/compute run a
        cuda:0/compute record e0
        cuda:0/copy-out wait e0
        cuda:0/copy-out copy a -> cuda:1/copy-in
        cuda:0/copy-out record e1
        cuda:1/compute wait e1
        cuda:1/compute run b
        cuda:1/compute record e2
        cuda:1/copy-in wait e2
        cuda:1/copy-in free a
        cuda:0/compute wait e1
        cuda:0/compute free a
        output b on cuda:1
        """,
    )
    assert spans == [("a", 0, 1), ("a", 1, 3.5), ("b", 3.5, 7.5)]
    assert found.arrows == ((0, 1), (1, 2))
    assert [str(stream) for stream in found.spans[1].streams] == [
        "cuda:0/copy-out",
        "cuda:1/copy-in",
    ]


def test_streams_go_on_while_nothing_holds_them_back():
    """
    cpu/compute   |a a|b b b|d|
    cpu/compute1       |c|
    """
    graph = asc.Graph()
    a = graph.add(int, name="a", seconds=2)
    b, c = graph.add(int, a, name="b", seconds=3), graph.add(int, a, name="c", seconds=1)
    graph.output(graph.add(int, b, c, name="d", seconds=1))
    program = asc.schedule(
        graph, asc.Machine([asc.Device("cpu", streams=2)]), policy="single"
    ).program
    spans, found = timeline(graph, str(program))
    assert spans == [("a", 0, 2), ("b", 2, 5), ("c", 2, 3), ("d", 5, 6)]
    assert found.makespan == 6


COPIES = """
    input x on {home}
    input y on {home}
    {copies}
    cuda:0/compute wait e0
    cuda:0/compute run a
    cuda:1/compute wait e1
    cuda:1/compute run b
    cuda:0/compute record e2
    cuda:1/compute record e3
    {stream0} wait e2
    {stream0} free x
    {stream1} wait e3
    {stream1} free y
    output a on cuda:0
    output b on cuda:1
"""


def two_copies():
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    graph.output(graph.add(int, x, name="a", seconds=1), graph.add(int, y, name="b", seconds=1))
    return graph, asc.Costs.table({}, nbytes={"x": 1.5, "y": 3.5})


@pytest.mark.parametrize(
    ("home", "ways", "expected"),
    [
        ("cpu", ("cuda:0/copy-in copy x <- cpu", "cuda:1/copy-in copy y <- cpu"), [0, 0, 2, 4]),
        (
            "cuda:2",
            (
                "cuda:2/copy-out copy x -> cuda:0/copy-in",
                "cuda:2/copy-out copy y -> cuda:1/copy-in",
            ),
            [0, 2, 2, 6],
        ),
    ],
    ids=["to two devices, which do not disturb each other", "that leave one device"],
)
def test_copies_follow_each_other_where_they_share_a_stream(home, ways, expected):
    links = [asc.Link("cuda:2", f"cuda:{i}", 1, 0.5) for i in range(2)]
    machine = asc.Machine([*DEVICES, asc.Device("cuda:2")], [*LINKS, *links])
    graph, costs = two_copies()
    copies = "\n".join(f"{way}\n{way.split()[0]} record e{i}" for i, way in enumerate(ways))
    text = COPIES.format(
        home=home, copies=copies, stream0="cuda:0/copy-in", stream1="cuda:1/copy-in"
    )
    spans, found = timeline(graph, text, costs, machine)
    assert [(name, start) for name, start, _ in spans] == list(zip("xyab", expected, strict=True))
    assert [end - start for _, start, end in spans] == [2, 4, 1, 1]
    assert found.overlap().together_seconds == 1


def test_copies_that_enter_one_device_follow_each_other_though_they_leave_two():
    machine = asc.Machine(
        [asc.Device(f"cuda:{i}") for i in range(3)],
        [asc.Link(f"cuda:{i}", "cuda:2", 1, 0.5) for i in range(2)],
    )
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    graph.output(graph.add(int, [x, y], name="a", seconds=1))
    text = """
        input x on cuda:0
        input y on cuda:1
        cuda:0/copy-out copy x -> cuda:2/copy-in
        cuda:1/copy-out copy y -> cuda:2/copy-in
        cuda:2/copy-in record e0
        cuda:2/compute wait e0
        cuda:2/compute run a
        cuda:2/compute record e1
        cuda:2/copy-in wait e1
        cuda:2/copy-in free x
        cuda:2/copy-in free y
        output a on cuda:2
    """
    spans, _ = timeline(graph, text, asc.Costs.table({}, nbytes={"x": 1.5, "y": 3.5}), machine)
    assert spans == [("x", 0, 2), ("y", 2, 6), ("a", 6, 7)]


def test_durations_are_of_runs_and_copies_alone():
    graph = chain(("a", 1), ("b", 4))
    placement = asc.Placement({"a": "cuda:0", "b": "cpu"}, ("a", "b"))
    program = asc.schedule(
        graph, MACHINE, policy=lambda *_: placement, inputs={"x": "cuda:0"}
    ).program
    expected = {"run a": 1, "copy a -> cpu": 2.5, "run b": 4}
    found = durations(program, asc.Problem(graph, MACHINE))
    assert found == tuple(expected.get(str(instruction), 0) for instruction in program)
    assert sum(found) == 7.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:1/compute run a", "cuda:1/compute cannot run a"),
        ("cuda:0/copy-out copy x -> cuda:1", "cuda:0/copy-out cannot copy x -> cuda:1"),
    ],
)
def test_what_takes_for_ever_is_refused(text, message):
    machine = asc.Machine(DEVICES, LINKS[:2])
    graph = chain(("a", {"cpu": 3, "cuda:0": 1}))
    with pytest.raises(
        asc.ScheduleError, match=f"{message}: costs and links make it take for ever"
    ):
        simulate(asc.Program.parse(text), asc.Problem(graph, machine))


@given(
    parts=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(MACHINE.names)), min_size=1, max_size=8
    )
)
def test_a_chain_takes_the_sum_of_its_parts_wherever_it_runs(parts):
    names = [f"t{i}" for i in range(len(parts))]
    seconds, devices = zip(*parts, strict=True)
    placement = asc.Placement(dict(zip(names, devices, strict=True)), tuple(names))
    graph = chain(*zip(names, seconds, strict=True))
    schedule = asc.schedule(
        graph, MACHINE, policy=lambda *_: placement, costs=asc.Costs(default_nbytes=2)
    )
    copies = sum(a != b for a, b in itertools.pairwise(["cpu", *devices]))
    assert schedule.makespan == sum(seconds) + 2.5 * copies


def test_the_part_of_a_rank_takes_no_time_for_what_other_ranks_send():
    graph = asc.Graph()
    x = graph.input("x")
    h = graph.add(abs, x, name="h", on="cpu:0", seconds=2.0)
    graph.output(y=graph.add(abs, h, name="y", on="cpu:1", seconds=3.0))
    made = asc.schedule(graph, asc.Machine.emulated(gpus=0, hosts=2))
    part = made.program.part(1)
    assert asc.simulate(part, asc.Problem(graph, made.machine, made.costs)).makespan == 3.0
