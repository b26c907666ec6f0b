"""Loops: which waits for the run before lowering inserts, and which it leaves out."""

from __future__ import annotations

from textwrap import dedent

import pytest

import autosched as asc
from autosched.lowering import lower
from autosched.lowering.carried import insert_carried
from autosched.program.program import Program, Wait


def fn(*_: object) -> None:
    raise AssertionError("nothing runs here")


def looped(graph: asc.Graph, text: str) -> str:
    """Insert waits into a program of one run; return what was inserted, or stands before it."""
    lines = Program.parse(text).instructions
    homes = {value.index: "cpu" for value in graph.sources}
    return str(Program(tuple(insert_carried(lines, graph, homes))))


def chained() -> asc.Graph:
    """Return a graph that writes w, reads it, and reads it again with the result."""
    graph = asc.Graph()
    w = graph.input("w")
    graph.add(fn, w, name="write", writes=[w], outputs=())
    first = graph.add(fn, w, name="first")
    graph.output(graph.add(fn, w, first, name="second"))
    return graph


def test_one_wait_suffices_where_the_last_reader_comes_after_the_others():
    text = """
        cpu/a  run write
        cpu/a  record e0
        cpu/b  wait e0
        cpu/b  run first
        cpu/b  record e1
        cpu/c  wait e1
        cpu/c  run second
    """
    assert (
        looped(chained(), text)
        == dedent("""
        cpu/a  wait e2 of 1 run ago
        cpu/a  run write
        cpu/a  record e0
        cpu/b  wait e0
        cpu/b  run first
        cpu/b  record e1
        cpu/c  wait e1
        cpu/c  run second
        cpu/c  record e2
    """).strip()
    )


def test_a_stream_need_not_wait_for_its_own_tasks():
    text = """
        cpu/a  run write
        cpu/a  record e0
        cpu/b  wait e0
        cpu/b  run first
        cpu/b  record e1
        cpu/a  wait e1
        cpu/a  run second
    """
    assert "ago" not in looped(chained(), text)


@pytest.mark.parametrize(
    ("end", "event"),
    [
        ("cpu/b  record e7", 7),
        ("cpu/b  free first\ncpu/b  record e7", 7),
        ("cpu/b  wait e0\ncpu/b  record e7", 8),
        ("cpu/b  run other\ncpu/b  record e7", 8),
    ],
)
def test_an_event_that_is_recorded_directly_after_is_used_again(end: str, event: int) -> None:
    """Others would let the next run wait for more than it needs."""
    graph = asc.Graph()
    w = graph.input("w")
    graph.add(fn, w, name="write", writes=[w], outputs=())
    graph.output(graph.add(fn, graph.add(fn, w, name="first"), name="other"))
    head = "cpu/a  run write\ncpu/a  record e0\ncpu/b  wait e0\ncpu/b  run first"
    found = looped(graph, f"{head}\n{end}")
    assert found.startswith(f"cpu/a  wait e{event} of 1 run ago\n{head}\n")
    assert found.count("record") == 2 + (event == 8)


def test_what_no_run_writes_is_not_waited_for():
    graph = asc.Graph()
    w = graph.input("w")
    graph.output(graph.add(fn, w, name="a"), graph.add(fn, w, name="b"))
    assert "ago" not in looped(graph, "cpu/a run a\ncpu/b run b")


def test_the_first_task_with_shared_state_waits_for_the_last():
    graph = asc.Graph()
    for name in "abc":
        graph.add(fn, name=name, random=True, outputs=())
    text = "cpu/a run a\ncpu/a record e0\ncpu/b wait e0\ncpu/b run b\ncpu/b record e1\n"
    found = looped(graph, f"{text}cpu/c wait e1\ncpu/c run c")
    assert [line for line in found.splitlines() if "ago" in line] == ["cpu/a  wait e2 of 1 run ago"]
    assert found.endswith("cpu/c  run c\ncpu/c  record e2")


MACHINES = {
    "copy streams": asc.Machine.emulated(gpus=2),
    "a stream per copy": asc.Machine.emulated(gpus=2, contention=False),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_an_input_that_a_gpu_writes_is_copied_after_the_copy_back_of_the_run_before(machine):
    graph = asc.Graph()
    w, x = graph.inputs("w", "x")
    graph.add(fn, w, x, name="write", writes=[w], outputs=(), on="cuda:0")
    made = asc.schedule(graph, machine)
    loop = lower(asc.Problem(made.graph, machine), made.placement, in_flight=2)
    asc.verify(loop, graph, machine)
    (at,) = [k for k, i in enumerate(loop) if isinstance(i, Wait) and i.ago]
    assert str(loop.instructions[at + 1]).startswith("copy w")
    assert lower(asc.Problem(made.graph, machine), made.placement) == made.program


def test_a_loop_within_limited_memory_is_refused():
    graph = asc.Graph()
    graph.output(graph.add(fn, graph.input("x"), name="a"))
    made = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    with pytest.raises(asc.ScheduleError, match="memory is limited, and 2 runs in flight share it"):
        lower(asc.Problem(made.graph, made.machine), made.placement, limited=True, in_flight=2)
    with pytest.raises(asc.ScheduleError, match="must be a number of runs, 1 or more, got 0"):
        lower(asc.Problem(made.graph, made.machine), made.placement, in_flight=0)
