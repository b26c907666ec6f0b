"""Generated code of loops: it does what runs one after another do, and reads like this."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.codegen import Code, generate
from autosched.lowering import lower
from autosched.testing import graphs, machines
from tests.codegen.test_codegen import CPU, ONE_GPU, ROOT, loaded, on_cpu
from tests.laws.test_loops import COSTS, Serial, given_to, storage


def update(on: str = "cuda:0") -> asc.Graph:
    """Return a graph that adds to an input on a device, and returns what is there then."""
    graph = asc.Graph("update")
    w, x = graph.inputs("w", "x")
    with graph.on(on):
        graph.add(torch.Tensor.add_, w, x, writes=[w], name="add")
        graph.output(y=w * 2)
    return graph


def code_of(graph: asc.Graph, machine: asc.Machine, in_flight: int = 2) -> Code:
    made = asc.schedule(graph, machine, policy="round_robin", costs=COSTS)
    outputs = dict(made.program.outputs)
    program = lower(made.graph, machine, made.placement, outputs, in_flight=in_flight)
    return generate(program, made.graph, machine)


@given(
    graph=graphs(state=True),
    machine=machines(),
    in_flight=st.integers(2, 4),
    runs=st.integers(0, 5),
)
def test_the_code_of_a_loop_does_what_runs_one_after_another_do(
    graph: asc.Graph, machine: asc.Machine, in_flight: int, runs: int
) -> None:
    machine = asc.Machine(machine.devices, machine.links, imagined=True)
    code = code_of(graph, machine, in_flight)
    serial, inputs = Serial(graph, runs), given_to(graph, runs)
    batches = [{code.inputs[name]: item for name, item in given.items()} for given in inputs]
    torch.manual_seed(3)
    outputs = [*loaded(on_cpu(code))["loop"](batches, **code.given)]
    left = serial.state.copies()
    sources = [value.tensor for value in graph.sources if value.tensor is not None]
    mine = {storage(item) for item in [*sources, *(t for given in inputs for t in given.values())]}
    assert len(outputs) == runs
    for run, found in enumerate(outputs):
        for label, item in found.items():
            assert serial.agrees(run, label, item, storage(item) not in mine), code
    serial.state.restore()
    for one, other in zip([*inputs, left], [*serial.inputs, serial.left], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other), code


@pytest.mark.parametrize("machine", [CPU, ONE_GPU], ids=["cpu", "gpu"])
def test_a_loop_takes_tuples_and_dicts_and_step_runs_once(machine: asc.Machine) -> None:
    module = loaded(on_cpu(code_of(update(machine.names[-1]), machine)))
    w, x = torch.zeros(2), torch.ones(2)
    batches = iter([(w, x), {"w": w, "x": 2 * x}, (w, 3 * x)])
    assert [found["y"].tolist() for found in module["loop"](batches)] == [[2, 2], [6, 6], [12, 12]]
    assert module["step"](w, x=x)["y"].tolist() == [14, 14]
    assert [*module["loop"]([])] == []


@pytest.mark.parametrize("in_flight", [2, 3])
def test_so_many_batches_are_taken_before_the_first_result(in_flight: int) -> None:
    module = loaded(on_cpu(code_of(update(), ONE_GPU, in_flight=in_flight)))
    w, taken = torch.zeros(2), []

    def batches():
        for number in range(5):
            taken.append(number)
            yield w, torch.ones(2)

    ended = [len(taken) for _ in module["loop"](batches())]
    assert ended == [min(in_flight + run, 5) for run in range(5)]


def test_streams_are_synchronized_when_a_loop_is_left() -> None:
    module, log = loaded(on_cpu(code_of(update(), ONE_GPU))), []
    module["Idle"].synchronize = lambda stream: log.append(stream)
    running = module["loop"]([(torch.zeros(2), torch.ones(2))] * 5)
    next(running)
    log.clear()
    running.close()
    assert log == module["streams"]
    failing = module["loop"]([(torch.zeros(2), "no tensor")])
    with pytest.raises(TypeError):
        next(failing)
    assert log == [*module["streams"], *module["streams"]]


def test_a_run_reads_like_this() -> None:
    code = code_of(update(), ONE_GPU)
    assert "e0, e1, e2, e2_before = (Event(cuda0) for _ in range(4))\n" in code
    assert code[code.index("def step") :] == RUN


@pytest.mark.parametrize("machine", [CPU, ONE_GPU], ids=["cpu", "gpu"])
def test_the_code_of_a_loop_is_as_clean_as_ours(machine: asc.Machine) -> None:
    pytest.importorskip("ruff")
    code = code_of(update(machine.names[-1]), machine)
    for command in (["check"], ["format", "--check", "--diff"]):
        options = "--config", ROOT / "ruff.toml", "--stdin-filename", "step.py", "-"
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options],
            input=code, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


RUN = '''\
def step(w, x):
    """Run once; return the outputs by name."""
    (only,) = loop([(w, x)])
    return only


@torch.no_grad()
def issue(w, x):
    """Issue a run; return its outputs, and all that it leaves in memory."""
    global e2, e2_before
    e2, e2_before = e2_before, e2
    # stream cuda:0/copy-in
    with cuda0_copy_in:
        cuda0_copy_in.wait_event(e2_before)
        w_cuda0 = to(w, cuda0)
        x_cuda0 = to(x, cuda0)
        e0.record(cuda0_copy_in)
    # stream cuda:0/compute
    with cuda0_compute:
        cuda0_compute.wait_event(e0)
        w_cuda0.add_(x_cuda0)
        e1.record(cuda0_compute)
    # stream cuda:0/copy-out
    with cuda0_copy_out:
        cuda0_copy_out.wait_event(e1)
        w.copy_(w_cuda0, non_blocking=True)
        e2.record(cuda0_copy_out)
    # stream cuda:0/compute
    with cuda0_compute:
        mul = w_cuda0 * 2
    return {"y": mul}, locals()
'''
