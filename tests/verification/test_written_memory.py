"""What is written has one memory on a device, and one anywhere if its parts are written."""

from __future__ import annotations

import autosched as asc
from tests.verification.test_verify import refused


def viewed():
    """A view is made before its base is written, and read thereafter."""
    graph = asc.Graph()
    x = graph.input("x")
    row = x[0]
    x.add_(1)
    graph.output(y=row * 2)
    return graph


VIEWED = """
    2 runs in flight
    input x on cpu
    cpu/compute  wait e1 of 1 run ago
    cpu/compute  copy x -> cuda:0
    cpu/compute  record e0
    cuda:0/compute  wait e0
    cuda:0/compute  run getitem
    cuda:0/compute  run add
    cuda:0/compute  run mul
    cuda:0/compute  copy x@1 -> cpu overwriting
    cuda:0/compute  record e1
    output y on cuda:0
"""


def test_a_view_in_memory_of_its_own_does_not_change_with_its_base():
    apart = (
        "cpu/compute copy x -> cuda:0\n",
        "cpu/compute copy x -> cuda:0\ncpu/compute run getitem\ncpu/compute copy getitem -> cuda:0\n",
    )
    message = refused(VIEWED, viewed(), apart, ("cuda:0/compute run getitem\n", ""))
    assert message.splitlines()[0] == (
        "task 'add' changes 'getitem' on cuda:0, which is there in memory of its own "
        "(law: presence)"
    )


def test_what_is_copied_over_the_callers_memory_replaces_the_views_of_it():
    """A task that reads the view thereafter would read what a later task wrote."""
    graph = asc.Graph()
    x = graph.input("x")
    row = x[0]
    graph.output(y=row * 2)
    x.add_(1)
    program = """
        input x on cpu
        cpu/compute  run getitem
        cpu/compute  run mul
        cpu/compute  copy x -> cuda:0
        cpu/compute  record e0
        cuda:0/compute  wait e0
        cuda:0/compute  run add
        cuda:0/compute  record e1
        cpu/compute  wait e1
        cpu/compute  copy x@1 <- cuda:0 overwriting
        cpu/compute  record e2
        cuda:0/compute  wait e2
        cuda:0/compute  free x@1
        output y on cpu
    """
    late = ("cpu/compute run mul\n", ""), ("overwriting\n", "overwriting\ncpu/compute run mul\n")
    message = refused(program, graph, *late)
    assert message.splitlines()[0].startswith("'getitem' on cpu is read but not there")


def halves():
    """The two halves of x are written, and one of them is read."""
    graph = asc.Graph()
    x = graph.input("x")
    x[:2] = 1
    x[2:] = 2
    graph.output(y=x[:2])
    return graph


HALVES = """
    2 runs in flight
    input x on cpu
    cpu/compute     wait e2 of 1 run ago
    cpu/compute     copy x -> cuda:0
    cpu/compute     record e0
    cuda:0/compute  wait e0
    cuda:0/compute  run setitem
    cuda:0/compute  run setitem_1
    cuda:0/compute  record e1
    cuda:0/compute  copy x@2 -> cpu overwriting
    cuda:0/compute  record e2
    cuda:0/compute  run getitem
    output y on cuda:0
"""


def test_parts_are_read_where_parts_are_written():
    moved = (
        "cuda:0/compute run getitem\noutput y on cuda:0",
        "cpu/compute wait e2\ncpu/compute run getitem\noutput y on cpu",
    )
    message = refused(HALVES, halves(), moved)
    assert message.splitlines()[0] == (
        "task 'getitem' touches a part of 'x', which is written elsewhere (law: presence)"
    )
