"""Random graphs, scheduled on one to four simulated GPUs, by seeds."""

from __future__ import annotations

import random

import torch

import autosched as asc
from autosched.machine.machine import Device, Link
from autosched.policies import POLICIES
from tests import strategies
from tests.gpu.for_gpus import on_gpus, physical
from tests.strategies import MOVES, inputs_for

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)


def drawn(seed: int) -> tuple[asc.Schedule, dict[str, torch.Tensor]]:
    """Return a schedule of a random graph that uses a GPU, and inputs."""
    source = random.Random(seed)
    while True:
        schedule, inputs = _drawn(source)
        if any(stream.device != "cpu" for stream in schedule.program.streams):
            return schedule, inputs


def _drawn(source: random.Random) -> tuple[asc.Schedule, dict[str, torch.Tensor]]:
    gpus = source.randint(1, 4)
    devices = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
    graph = asc.Graph("drawn")
    values = list(graph.inputs("x", "y"))
    if source.random() < 0.5:
        with graph.on(source.choice(devices)):
            values.append(graph.input("z"))
    meta = {graph.value(name).index: item.to("meta") for name, item in inputs_for(graph).items()}
    kinds = [kind for kind in MOVES if kind not in strategies.STATEFUL]
    for _ in range(source.randint(2, 10)):
        on = source.choice([None, *devices]) if source.random() < 0.7 else None
        kind = source.choice([*kinds, "mix", "mix", "pair"])
        move = strategies._Sample(kind, source.randrange(99), source.randrange(99), None, on)
        values += strategies._make(graph, values, meta, move)
    graph.output(*{id(v): v for v in source.choices(values, k=source.randint(1, 3))}.values())
    machine = asc.Machine(
        [Device(name, streams=source.randint(1, 3)) for name in devices],
        [Link(a, b, 1e9, 0.0) for i, a in enumerate(devices) for b in devices[:i]],
        imagined=True,
    )
    machine = physical(machine, gpus)
    policy = source.choice([*POLICIES])
    graph = on_gpus(graph)
    return asc.schedule(graph, machine, policy=policy, costs=COSTS), inputs_for(graph)
