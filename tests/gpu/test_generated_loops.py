"""Generated code of loops on played GPUs, whose streams go on in the worst order that events allow."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.codegen import generate
from autosched.lowering import lower
from autosched.testing import graphs, inputs_for, machines
from tests.gpu.fake_gpu import playing
from tests.gpu.for_gpus import on_gpus, there
from tests.gpu.test_accelerator import physical

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
RUNS = 4
Tensors = Mapping[str, torch.Tensor]


def batches(machine: asc.Machine, graph: asc.Graph) -> list[dict[str, torch.Tensor]]:
    """Inputs of each run: those that tasks write are the same tensors in all, others are new."""
    torch.manual_seed(3)
    first = there(machine, graph, inputs_for(graph))
    written = {name for name in first if graph.last_version(graph.value(name).index)}
    return [
        {name: item if name in written else item * 0.5**run for name, item in first.items()}
        for run in range(RUNS)
    ]


def copied(outputs: Tensors, given: Tensors) -> dict[str, list[float]]:
    """Copies of outputs on the host, without those that are inputs."""
    known = {id(item) for item in given.values()}
    return {name: item.cpu().tolist() for name, item in outputs.items() if id(item) not in known}


@settings(max_examples=settings().max_examples // 3)
@given(
    machine=machines(),
    gpus=st.integers(1, 3),
    in_flight=st.integers(2, 3),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_code_of_a_loop_does_what_runs_one_after_another_do_on_played_gpus(
    machine: asc.Machine, gpus: int, in_flight: int, seed: int, data: st.DataObject
) -> None:
    machine = physical(machine, gpus)
    graph = on_gpus(data.draw(graphs(machine.names, views=False)))
    with playing(gpus, seed):
        made = asc.schedule(graph, machine, policy="round_robin", costs=COSTS)
        program = lower(made.graph, machine, made.placement, in_flight=in_flight)
        expected = batches(machine, made.graph)
        wanted = [copied(made.run_serial(**given), given) for given in expected]
        code = generate(program, made.graph, machine)
        names: dict[str, object] = {}
        exec(code, names)
        given = batches(machine, made.graph)
        renamed = [{code.inputs[name]: item for name, item in one.items()} for one in given]
        runs = names["loop"](renamed, **code.given)  # type: ignore[operator]
        found = [copied(outputs, one) for outputs, one in zip(runs, given, strict=True)]
        assert found == wanted
        for one, other in zip(given, expected, strict=True):
            assert all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def test_each_wait_for_the_run_before_is_needed() -> None:
    """Without one, some order of the streams gives a wrong result."""
    graph = asc.Graph()
    with graph.on("cuda:0"):
        w = graph.input("w")
    with graph.on("cuda:1"):
        x = graph.input("x")
        graph.add(torch.Tensor.add_, w, x, writes=[w], name="add")
        graph.output(y=w * 2)
    machine = asc.Machine.emulated(gpus=2)
    with playing(2):
        made = asc.schedule(graph, machine, policy="heft", costs=COSTS)
        program = lower(made.graph, machine, made.placement, in_flight=2)
        code = generate(program, made.graph, machine)
    waits = re.findall(r"^ *\w+\.wait_event\(e\d+_before\)\n", code, re.MULTILINE)
    assert waits

    def is_right(text: str, seed: int) -> bool:
        with playing(2, seed):
            names: dict[str, object] = {}
            exec(text, names)
            w, x = torch.zeros(3, device="cuda:0"), torch.ones(3, device="cuda:1")
            runs = names["loop"]([(w, x)] * RUNS)  # type: ignore[operator]
            found = [outputs["y"].tolist() for outputs in runs]
            return found == [[2.0 * run] * 3 for run in range(1, RUNS + 1)]

    assert all(is_right(code, seed) for seed in range(10))
    for wait in waits:
        assert not all(is_right(code.replace(wait, "", 1), seed) for seed in range(10))
