"""Clusters for tests: emulated machines of several ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

import autosched as asc
from autosched.lowering import lower
from autosched.machine.device import Network
from autosched.machine.machine import Machine
from autosched.program.program import Program

# The program of h on cpu:0 and y, which reads it, on cpu:1, as lowering makes it.
CHAIN = """
    rank 0 has cpu:0
    rank 1 has cpu:1
    input x on cpu:0
    cpu:0/compute   run h
    cpu:0/compute   record e0
    cpu:0/copy-out  wait e0
    cpu:0/copy-out  copy h -> cpu:1/copy-in
    cpu:1/copy-in   record e1
    cpu:1/compute   wait e1
    cpu:1/compute   run y
    cpu:0/copy-out  record e2
    cpu:0/compute   wait e2
    cpu:0/compute   free h
    cpu:1/compute   record e3
    cpu:1/copy-in   wait e3
    cpu:1/copy-in   free h
    output y on cpu:1
"""


@st.composite
def clusters(draw: st.DrawFn, most_ranks: int = 5) -> Machine:
    """Sample machines of 1 to ``most_ranks`` ranks, each with a CPU and at most two accelerators."""
    hosts = draw(st.integers(1, most_ranks))
    network = Network(1e9, 1e-5, direct=draw(st.booleans()))
    made = Machine.emulated(
        draw(st.integers(0, 2)), hosts=hosts, contention=draw(st.booleans()), network=network
    )
    devices = [replace(device, streams=draw(st.integers(1, 2))) for device in made.devices]
    return Machine(devices, made.links, contention=made.contention, network=network)


def parts_of(program: Program) -> list[Program]:
    """Return the parts of all ranks."""
    return [program.part(rank) for rank in dict.fromkeys(rank for _, rank in program.ranks)]


def pinned(graph: asc.Graph, machine: Machine) -> Program:
    """Return the program of a graph in which each task says its device."""
    placement = asc.Placement(
        {task.name: str(task.device) for task in graph.tasks},
        tuple(task.name for task in graph.tasks),
    )
    return lower(asc.Problem(graph, machine), placement)
