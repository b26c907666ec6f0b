"""Proofs of loops: what is refused, by which law, and with which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autosched as asc
from autosched.program.program import Wait
from autosched.verification.verify import verify
from tests.verification.test_verify import changed, fn, refused, written

# A task reads w at home, another writes it on a GPU, and a third reads it at home again.
LOOP = """
    2 runs in flight
    input w on cpu
    cuda:0/copy-in   wait e3 of 1 run ago
    cuda:0/copy-in   copy w <- cpu
    cuda:0/copy-in   record e0
    cpu/compute      run read
    cpu/compute      record e1
    cuda:0/compute   wait e0
    cuda:0/compute   run write
    cuda:0/compute   record e2
    cuda:0/copy-out  wait e2
    cuda:0/copy-out  wait e1
    cuda:0/copy-out  copy w@1 -> cpu overwriting
    cuda:0/copy-out  record e3
    cpu/compute      wait e3
    cpu/compute      run look
    output read on cpu
    output look on cpu
"""
CARRIED = "wait e3 of 1 run ago"
MISSING = (
    "the copy of 'w' to cuda:0 must follow the copy of 'w' to cpu of the run before, "
    "which is not waited for: both use the memory of 'w' (law: order)"
)
REFUSED = {
    "no wait": ([(f"cuda:0/copy-in {CARRIED}\n", "")], MISSING),
    "of this run, not the last": (
        [(CARRIED, "wait e3")],
        "event e3 is waited for but not recorded before (law: events)",
    ),
    "of a run too early": ([(CARRIED, "wait e3 of 2 runs ago")], MISSING),
    "another event": ([(CARRIED, "wait e2 of 1 run ago")], MISSING),
    "too late": (
        [
            (f"cuda:0/copy-in {CARRIED}\n", ""),
            ("cuda:0/copy-in record e0", f"cuda:0/copy-in {CARRIED}\ncuda:0/copy-in record e0"),
        ],
        MISSING,
    ),
    "an event that nothing records": (
        [(CARRIED, "wait e9 of 1 run ago")],
        "event e9 of an earlier run is waited for but never recorded (law: events)",
    ),
    "a single run": (
        [("2 runs in flight\n", "")],
        "event e3 of an earlier run is waited for in a single run (law: events)",
    ),
    "what this run does": (
        [("cuda:0/copy-out wait e1\n", "cuda:0/copy-out wait e1 of 1 run ago\n")],
        "the copy overwrites memory that task 'read' reads, which is not waited for (law: order)",
    ),
}


@pytest.mark.parametrize(("edits", "message"), REFUSED.values(), ids=REFUSED)
def test_a_loop_that_breaks_a_law_is_refused_and_told_why(edits, message):
    assert refused(LOOP, written(), *edits).splitlines()[0] == message


def test_a_write_must_follow_those_that_read_it_in_the_run_before():
    graph = asc.Graph()
    w = graph.input("w")
    graph.add(fn, w, name="write", writes=[w], outputs=())
    graph.output(look=graph.add(fn, w, name="look"))
    program = """
        2 runs in flight
        input w on cpu
        cpu/a  wait e1 of 1 run ago
        cpu/a  run write
        cpu/a  record e0
        cpu/b  wait e0
        cpu/b  run look
        cpu/b  record e1
        output look on cpu
    """
    verify(asc.Program.parse(program), graph)
    message = refused(program, graph, ("cpu/a wait e1 of 1 run ago\n", ""))
    assert message.startswith("task 'write' must follow task 'look' of the run before")


def test_the_message_shows_what_is_not_waited_for():
    lines = refused(LOOP, written(), (f"cuda:0/copy-in {CARRIED}\n", "")).splitlines()
    assert "    cuda:0/copy-in   copy w <- cpu    <-- here" in lines
    assert "    cuda:0/copy-out  copy w@1 -> cpu overwriting    <-- not waited for" in lines


@pytest.mark.parametrize("ago", [-1, 0.5, True])
def test_what_is_no_number_of_runs_is_refused(ago):
    program = changed(LOOP)
    lines = (Wait(program.instructions[0].stream, 3, ago), *program.instructions[1:])
    with pytest.raises(asc.ProgramError, match=r"no number of runs \(law: events\)"):
        verify(replace(program, instructions=lines), written())


@pytest.mark.parametrize("count", [0, -2, 1.5, True, "2"])
def test_what_is_no_number_of_runs_in_flight_is_refused(count):
    with pytest.raises(asc.ProgramError, match="runs in flight must be a number, 1 or more, got"):
        verify(replace(changed(LOOP), in_flight=count), written())


def test_what_is_freed_is_freed_after_its_uses_and_the_rest_when_the_run_has_ended():
    free = "cuda:0/copy-in wait e2\ncuda:0/copy-in free w@1\n"
    early = ("cuda:0/copy-out copy w@1", f"{free}cuda:0/copy-out copy w@1")
    assert "is read after it was freed" in refused(LOOP, written(), early)
    late = ("cpu/compute wait e3\n", f"{free}cpu/compute wait e3\n")
    message = refused(LOOP, written(), late)
    assert message.startswith("'w' (version 1) on cuda:0 is freed while the copy of 'w' to cpu")


def noise():
    """Return a graph of two tasks on two devices that draw random numbers."""
    graph = asc.Graph()
    for name in "ab":
        graph.add(fn, name=name, random=True, outputs=())
    return graph


NOISE = """
    2 runs in flight
    cuda:0/compute  wait e1 of 1 run ago
    cuda:0/compute  run a
    cuda:0/compute  record e0
    cuda:1/compute  wait e0
    cuda:1/compute  run b
    cuda:1/compute  record e1
"""


def test_runs_use_shared_state_one_after_another():
    message = refused(NOISE, noise(), ("cuda:0/compute wait e1 of 1 run ago\n", ""))
    assert message.splitlines()[0] == (
        "task 'a' must follow task 'b' of the run before, which is not waited for: "
        "both use the state of the same Generator (law: order)"
    )


def test_reading_the_same_memory_needs_no_order():
    graph = asc.Graph()
    w = graph.constant(object(), "w")
    for name in "ab":
        graph.add(fn, w, name=name, outputs=())
    text = "2 runs in flight\ninput w on cpu\ncpu/compute run a\ncpu/compute1 run b"
    verify(asc.Program.parse(text), graph)


PARTS = """
    2 runs in flight
    input w on cpu
    cpu/a  run upper
    cpu/a  run add
    cpu/b  run lower
    cpu/b  run mul
"""


def test_writes_of_separate_parts_need_no_order_between_runs():
    graph = asc.Graph()
    w = graph.input("w")
    w[0].add_(1)
    w[1].mul_(2)
    text = PARTS.replace("upper", "getitem").replace("lower", "getitem_1")
    verify(changed(text), graph)
    moved = text.replace("cpu/b  run mul", "cpu/a record e0\n cpu/c wait e0\n cpu/c run mul")
    with pytest.raises(asc.ProgramError, match=r"'getitem_1' on cpu is made by .* not waited for"):
        verify(changed(moved), graph)
