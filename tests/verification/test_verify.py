"""Verify: one refused program for each law and each message, made from accepted ones by changing a line or two."""

from __future__ import annotations

import re
from dataclasses import replace
from textwrap import dedent

import pytest

import autosched as asc
from autosched.program.program import Stream


def fn(*args):
    raise AssertionError("nothing runs here")


def changed(text, *edits):
    """Parse a program in which each old line (or lines) stands once and is replaced by the new."""
    lines = "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
    for old, new in edits:
        assert lines.count(old) == 1, f"{old!r} is there {lines.count(old)} times"
        lines = lines.replace(old, new)
    return asc.Program.parse(lines)


def refused(text, graph, *edits):
    """Return the message with which the changed program is refused."""
    asc.verify(changed(text), graph)
    with pytest.raises(asc.ProgramError) as error:
        asc.verify(changed(text, *edits), graph)
    return str(error.value)


def chain():
    graph = asc.Graph("chain")
    x = graph.input("x")
    graph.output(graph.add(fn, graph.add(fn, x, name="h"), name="y"))
    return graph


CHAIN = """
    input x on cpu
    cuda:0/copy-in   copy x <- cpu
    cuda:0/copy-in   record e0
    cuda:0/compute   wait e0
    cuda:0/compute   run h
    cuda:0/compute   record e1
    cuda:0/copy-out  wait e1
    cuda:0/copy-out  copy h -> cuda:1/copy-in
    cuda:0/copy-out  record e2
    cuda:1/compute   wait e2
    cuda:1/compute   run y
    cuda:0/copy-in   wait e1
    cuda:0/copy-in   free x
    cuda:0/compute   wait e2
    cuda:0/compute   free h
    cuda:1/compute   record e3
    cuda:1/copy-in   wait e3
    cuda:1/copy-in   free h
    output y on cuda:1
"""
COPY_H = "cuda:0/copy-out copy h -> cuda:1/copy-in"

REFUSED = {
    "recorded twice": (
        [("cuda:1/compute record e3", "cuda:1/compute record e2")],
        "event e2 is recorded twice (law: events)",
    ),
    "waited for before": (
        [
            (
                "cuda:0/copy-in record e0\ncuda:0/compute wait e0",
                "cuda:0/compute wait e0\ncuda:0/copy-in record e0",
            )
        ],
        "event e0 is waited for but not recorded before (law: events)",
    ),
    "copy missing": (
        [(COPY_H + "\n", "")],
        "'h' on cuda:1 is read but not there; it is on cuda:0: a copy is missing (law: presence)",
    ),
    "nothing made it": (
        [("cuda:0/compute run h\n", "")],
        "'h' on cuda:0 is read but not there; nothing made it before (law: presence)",
    ),
    "reader does not wait": (
        [("cuda:0/compute wait e0\n", "")],
        "'x' on cuda:0 is made by the copy of 'x' to cuda:0, which is not waited for (law: order)",
    ),
    "read after free": (
        [("cuda:0/copy-out wait e1", "cuda:0/compute free h\ncuda:0/copy-out wait e1")],
        "'h' on cuda:0 is read after it was freed (law: presence)",
    ),
    "freed twice": (
        [("cuda:0/compute free h", "cuda:0/compute free h\ncuda:0/compute free h")],
        "'h' on cuda:0 is freed twice (law: free)",
    ),
    "freed too early": (
        [("cuda:0/compute wait e2\n", "")],
        "'h' on cuda:0 is freed while the copy of 'h' to cuda:1 may still use it (law: free)",
    ),
    "freed by another stream": (
        [("cuda:1/copy-in free h", "cuda:1/compute free h")],
        "'h' on cuda:1 was allocated on cuda:1/copy-in, and only that stream may free it (law: free)",
    ),
    "freed where it is not": (
        [("cuda:1/copy-in free h", "cuda:1/copy-in free x")],
        "'x' on cuda:1 is not there to be freed (law: free)",
    ),
    "never freed": ([("cuda:0/copy-in free x\n", "")], "'x' on cuda:0 is never freed"),
    "output freed": (
        [("cuda:1/copy-in free h", "cuda:1/copy-in free h\ncuda:1/compute free y")],
        "output 'y', 'y' on cuda:1, is freed",
    ),
    "input freed": (
        [("cuda:0/copy-in free x", "cuda:0/copy-in free x\ncpu/compute free x")],
        "'x' on cpu belongs to the caller and is not to be freed (law: free)",
    ),
    "task twice": (
        [("cuda:1/compute run y", "cuda:1/compute run y\ncuda:1/compute run y")],
        "task 'y' runs twice (law: single)",
    ),
    "task never": (
        [("cuda:1/compute run y\n", ""), ("output y on cuda:1", "")],
        "task 'y' never runs",
    ),
    "unknown task": (
        [("cuda:1/compute run y", "cuda:1/compute run z")],
        "graph 'chain' has no task 'z'; tasks are 'h', 'y' (law: single)",
    ),
    "copied twice": (
        [(COPY_H, f"{COPY_H}\n{COPY_H}")],
        "'h' on cuda:1 is there already (law: single)",
    ),
    "copied to where it is": (
        [(COPY_H, f"cuda:0/copy-out copy h -> cuda:0\n{COPY_H}")],
        "a copy from cuda:0 to cuda:0 is on a stream of one of the two (law: presence)",
    ),
    "copied back over what tasks did not write": (
        [(COPY_H, f"{COPY_H}\ncuda:0/copy-out copy h -> cpu overwriting")],
        "'h' is no input that lives on cpu (law: presence)",
    ),
    "no output": ([("output y on cuda:1", "")], "the program's outputs are [], the graph's ['y']"),
    "output twice": (
        [("output y on cuda:1", "output y on cuda:1\noutput y on cuda:1")],
        "the program's outputs are ['y', 'y'], the graph's ['y']",
    ),
    "output elsewhere": (
        [("output y on cuda:1", "output y on cpu")],
        "output 'y', 'y' on cpu, is not there at the end",
    ),
    "no input": ([("input x on cpu\n", "")], "the program's inputs are [], the graph's ['x']"),
    "input twice": (
        [("input x on cpu", "input x on cpu\ninput x on cuda:1")],
        "the program's inputs are ['x', 'x'], the graph's ['x']",
    ),
}


@pytest.mark.parametrize(("edits", "message"), REFUSED.values(), ids=REFUSED)
def test_a_program_that_breaks_a_law_is_refused_and_told_why(edits, message):
    assert refused(CHAIN, chain(), *edits).splitlines()[0] == message


def test_a_message_shows_the_place_and_what_is_not_waited_for():
    message = refused(CHAIN, chain(), ("cuda:1/compute wait e2\n", ""))
    assert message == dedent("""
        'h' on cuda:1 is made by the copy of 'h' to cuda:1, which is not waited for (law: order)

            cuda:0/copy-out  wait e1
            cuda:0/copy-out  copy h -> cuda:1/copy-in    <-- not waited for
            cuda:0/copy-out  record e2
            cuda:1/compute   run y    <-- here
            cuda:0/copy-in   wait e1
            cuda:0/copy-in   free x
            cuda:0/compute   wait e2
    """).strip("\n")


def test_a_message_leaves_out_what_is_far_away():
    message = refused(
        CHAIN, chain(), ("cuda:0/copy-out wait e1\n", ""), ("cuda:0/copy-in wait e1\n", "")
    )
    assert "..." not in message
    message = refused(CHAIN, chain(), ("cuda:0/copy-in wait e1\n", ""))
    lines = message.splitlines()
    assert lines[2:4] == ["    cuda:0/compute   run h    <-- not waited for", "    ..."]
    assert lines[-4] == "    cuda:0/copy-in   free x    <-- here"


def test_a_copy_on_a_stream_of_a_third_device_is_refused():
    program = changed(CHAIN)
    at, copy = next((i, c) for i, c in enumerate(program) if str(c) == "copy h -> cuda:1/copy-in")
    moved = replace(copy, stream=Stream("cuda:2", "copy-out"), also=None)
    edited = replace(
        program, instructions=(*program.instructions[:at], moved, *program.instructions[at + 1 :])
    )
    with pytest.raises(
        asc.ProgramError, match="a copy from cuda:0 to cuda:1 is on a stream of one of the two"
    ):
        asc.verify(edited, chain())


def written():
    """W is read, written and looked at."""
    graph = asc.Graph("written")
    w = graph.input("w")
    read = graph.add(fn, w, name="read")
    graph.add(fn, w, name="write", writes=[w], outputs=())
    graph.output(read, graph.add(fn, w, name="look"))
    return graph


WRITTEN = """
    input w on cpu
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
    cuda:0/copy-in   wait e3
    cuda:0/copy-in   free w@1
    output read on cpu
    output look on cpu
"""
BACK = "cuda:0/copy-out copy w@1 -> cpu overwriting\n"

REFUSED_WRITES = {
    "written over a reader": (
        [("cuda:0/copy-out wait e1\n", "")],
        "the copy overwrites memory that task 'read' reads, which is not waited for (law: order)",
    ),
    "not copied back": (
        [
            (BACK, ""),
            (
                "cpu/compute run look",
                "cuda:0/compute run look\ncuda:0/compute record e9\ncuda:0/copy-in wait e9",
            ),
            ("output look on cpu", "output look on cuda:0"),
        ],
        "input 'w', 'w' (version 1) on cpu, is not there at the end",
    ),
    "copied back beside the caller's": (
        [("copy w@1 -> cpu overwriting", "copy w@1 -> cpu")],
        "'w' (version 1) on cpu is not in the caller's memory at the end",
    ),
    "the wrong version": (
        [(BACK, BACK.replace("w@1", "w"))],
        "'w' on cuda:0 is read but was overwritten by version 1 (law: presence)",
    ),
    "freed as the wrong version": (
        [("cuda:0/copy-in free w@1", "cuda:0/copy-in free w")],
        "'w' on cuda:0 is not there to be freed (law: free)",
    ),
}


@pytest.mark.parametrize(("edits", "message"), REFUSED_WRITES.values(), ids=REFUSED_WRITES)
def test_a_program_that_breaks_a_law_of_writes_is_refused_and_told_why(edits, message):
    assert refused(WRITTEN, written(), *edits).splitlines()[0] == message


IN_PLACE = """
    input w on cpu
    cpu/compute   run read
    cpu/compute   record e0
    cpu/compute1  wait e0
    cpu/compute1  run write
    cpu/compute1  record e1
    cpu/compute   wait e1
    cpu/compute   run look
    output read on cpu
    output look on cpu
"""


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (
            "cpu/compute1 wait e0\n",
            "task 'write' writes memory that task 'read' reads, which is not waited for",
        ),
        (
            "cpu/compute wait e1\n",
            "'w' (version 1) on cpu is made by task 'write', which is not waited for",
        ),
    ],
)
def test_a_task_that_writes_is_ordered_behind_readers_and_before_the_next(wait, message):
    assert refused(IN_PLACE, written(), (wait, "")).startswith(message)


def ordered():
    graph = asc.Graph()
    a = graph.add(fn, name="a")
    graph.output(a, graph.add(fn, name="b", after=[a]))
    return graph


ORDERED = """
    cuda:0/compute  run a
    cuda:0/compute  record e0
    cuda:1/compute  wait e0
    cuda:1/compute  run b
    output a on cuda:0
    output b on cuda:1
"""


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            [("cuda:1/compute wait e0\n", "")],
            "task 'a', after which 'b' must run, is not waited for (law: order)",
        ),
        (
            [
                ("cuda:0/compute run a\n", ""),
                ("cuda:1/compute run b", "cuda:1/compute run b\ncuda:0/compute run a"),
            ],
            "task 'a', after which 'b' must run, has not run (law: order)",
        ),
    ],
)
def test_an_order_edge_is_held_though_no_memory_tells(edits, message):
    assert refused(ORDERED, ordered(), *edits).splitlines()[0] == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cpu/compute run far", "task 'far' must run on cuda:0 (law: place)"),
        (
            "cuda:7/compute run far",
            "stream cuda:7/compute is on no device of the machine: cpu, cuda:0 (law: place)",
        ),
        (
            "cuda:0/kernel run far\ncuda:0/compute run near",
            "cuda:0/compute is one compute stream too many",
        ),
    ],
)
def test_a_program_keeps_to_constraints_and_to_the_machine(line, message):
    graph = asc.Graph()
    graph.add(fn, name="far", on="cuda:0", outputs=0)
    graph.add(fn, name="near", outputs=0)
    rest = "" if "near" in line else "\ncpu/compute run near"
    with pytest.raises(asc.ProgramError, match=re.escape(message)):
        asc.verify(asc.Program.parse(line + rest), graph, asc.Machine.emulated(gpus=1))


def test_a_copy_needs_a_link():
    graph = asc.Graph()
    graph.output(h=graph.add(fn, graph.input("x"), name="h"))
    program = asc.schedule(
        graph, asc.Machine.emulated(gpus=1), outputs="cuda:0", policy="single"
    ).program
    apart = asc.Machine(asc.Machine.emulated(gpus=1).devices)
    with pytest.raises(asc.ProgramError, match="no link joins cpu and cuda:0"):
        asc.verify(program, graph, apart)


def test_memory_that_took_another_name_is_still_to_be_freed():
    """A copy comes again under the name that its memory had before it was written; the first is not forgotten."""
    graph = asc.Graph()
    made = graph.add(fn, name="made")
    read = graph.add(fn, made, name="read")
    graph.add(fn, made, name="write", writes=[made], outputs=())
    graph.output(y=read)
    program = """\
    cuda:0/compute  run made
    cuda:0/compute  record e0
    cuda:0/copy-out  wait e0
    cuda:0/copy-out  copy made -> cuda:1/copy-in
    cuda:1/copy-in  record e1
    cuda:1/compute  wait e1
    cuda:1/compute  run write
    cuda:0/copy-out  copy made -> cuda:1/copy-in
    cuda:1/copy-in  record e2
    cuda:0/compute  wait e2
    cuda:0/compute  free made
    cuda:1/compute  wait e2
    cuda:1/compute  run read
    cuda:1/compute  record e3
    cuda:1/copy-in  wait e3
    cuda:1/copy-in  free made@1
    cuda:1/copy-in  free made
    output y on cuda:1
    """
    text = dedent(program)
    asc.verify(asc.Program.parse(text), graph)
    with pytest.raises(asc.ProgramError, match="'made' on cuda:1 is never freed"):
        asc.verify(asc.Program.parse(text.replace("cuda:1/copy-in  free made@1\n", "")), graph)
