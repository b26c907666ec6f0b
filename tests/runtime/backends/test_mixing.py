"""Emulated devices: tensors of two devices do not meet, but where torch lets them; and nothing else changes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch.nn import functional

import autosched as asc
from autosched import testing
from autosched.errors import InterleavingError

TWO_GPUS = asc.Machine.emulated(gpus=2)
OUTSIDE = torch.ones(4)
NORM = torch.nn.BatchNorm1d(4).eval()
X = torch.arange(4.0)
MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)


def scheduled(fn, on="cuda:0", backend="emulated", machine=TWO_GPUS, **options):
    graph = asc.Graph()
    graph.output(y=graph.add(fn, graph.input("x"), on=on))
    return asc.schedule(
        graph, machine, costs=asc.Costs(default_seconds=0), backend=backend, **options
    )


def result(fn, **options):
    with scheduled(fn, **options) as schedule:
        first = schedule(x=X.clone())["y"]
        assert torch.equal(schedule(x=X.clone())["y"], first)
        return first


def sums_on_the_cpu(x):
    return x + torch.arange(4.0)


def _closure(w):
    return lambda x: x + w


REFUSED = {
    "a factory": sums_on_the_cpu,
    "data": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a result of what is on the CPU": lambda x: x + torch.relu(torch.ones(8)[::2] * 2).neg(),
    "what came to the CPU": lambda x: x + x.cpu(),
    "what was sent where another is": lambda x: x + x.to(torch.ones(4)),
    "a list": lambda x: torch.stack([x, torch.zeros(4)]),
    "a product": lambda x: x @ torch.eye(4),
    "a function of torch.nn": lambda x: functional.linear(x, torch.ones(2, 4)),
    "a mask": lambda x: x.masked_fill(torch.ones(4) > 0, 0.0),
    "in place": lambda x: x.clone().add_(torch.ones(4)),
    "in place on the CPU": lambda x: torch.ones(4).add_(x),
    "in place on a number on the CPU": lambda x: torch.tensor(1.0).add_(x[0]),
    "an output": lambda x: torch.add(x, 1, out=torch.ones(4)),
    "indices of gather": lambda x: x.gather(0, torch.tensor([1])),
    "an operator": lambda x: torch.ops.aten.add.Tensor(x, torch.ones(4)),
    "a default": lambda x, w=OUTSIDE: x + w,
    "a closure": _closure(torch.ones(4)),
    "a global variable": lambda x: x + OUTSIDE,
    "a copy on the CPU": lambda x: x.new_zeros(4) + torch.empty_like(torch.ones(4)).fill_(0),
    "a named method": partial(lambda y, x: x + torch.ones(4) + y, 1.0),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_refuses_is_refused_with_torchs_words(fn):
    with scheduled(fn) as schedule, pytest.raises(asc.TaskError) as error:
        schedule(x=X.clone())
    assert f"RuntimeError: {MIXED}" in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "options", [{}, {"check": True}, {"backend": "virtual"}, {"backend": "virtual", "check": True}]
)
def test_it_is_refused_in_every_way_of_emulating(options):
    with scheduled(sums_on_the_cpu, **options) as schedule:
        for _ in range(2):
            with pytest.raises(asc.TaskError) as error:
                schedule(x=X)
    line = f"{__file__}:{sums_on_the_cpu.__code__.co_firstlineno + 1}"
    assert (
        f"{MIXED} (add at {line}, emulated as on a GPU); the tensor on cpu was made at {line}; "
        in str(error.value)
    )
    assert "make it with device= of another argument's .device, or of asc.Here" in str(error.value)


def test_testing_check_refuses_it():
    graph = asc.Graph()
    graph.output(y=graph.add(sums_on_the_cpu, graph.input("x"), on="cuda:0"))
    with pytest.raises(InterleavingError, match="found at least two devices"):
        testing.check(
            graph,
            asc.Machine.emulated(gpus=1),
            examples={"x": X},
            policies=["single"],
            interleavings=1,
        )


def test_a_result_on_the_cpu_is_refused_where_another_task_meets_it():
    graph = asc.Graph()
    with graph.on("cuda:0"):
        graph.output(y=graph.add(torch.add, graph.input("x"), graph.add(torch.arange, 4.0)))
    with asc.schedule(graph, TWO_GPUS) as schedule, pytest.raises(asc.TaskError) as error:
        schedule(x=X)
    assert f"{MIXED} (add, emulated as on a GPU)" in str(error.value)


def test_what_one_task_keeps_for_another_is_where_it_was_made():
    kept = {}
    graph = asc.Graph()
    first = graph.add(lambda x: kept.setdefault("y", x * 2).sum(), graph.input("x"), on="cuda:0")
    graph.output(y=graph.add(lambda total, x: kept["y"] + x, first, graph.value("x"), on="cuda:1"))
    with (
        asc.schedule(graph, TWO_GPUS) as schedule,
        pytest.raises(asc.TaskError, match="two devices, cuda:0 and cuda:1!"),
    ):
        schedule(x=X)


ACCEPTED = {
    "a factory on its device": lambda x: x + torch.arange(4.0, device=x.device),
    "data on its device": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "its device made again": lambda x: x + torch.ones(4, device=torch.device(x.device)),
    "data that is sent there": lambda x: x + torch.ones(4).to(x.device),
    "what is sent where another is": lambda x: x + torch.ones(4).to(x),
    "what is like another": lambda x: x + torch.ones(4).type_as(x),
    "made of another": lambda x: (
        x + torch.zeros_like(x) + x.new_zeros(4) + x.new_tensor([1.0, 2.0, 3.0, 4.0])
    ),
    "a number on the CPU": lambda x: torch.tensor(2.0) * x + torch.tensor(1.0),
    "indices on the CPU": lambda x: x[torch.tensor([1, 2])].sum() + x,
    "a mask among indices": lambda x: x[torch.tensor([True, False, True, True])],
    "assignment": lambda x: _assigned(x.clone()),
    "copy_": lambda x: x.clone().copy_(torch.ones(4)),
    "on the CPU alone": lambda x: (x.cpu() + torch.ones(4)).sum(),
    "to the CPU and back": lambda x: (x.cpu() + torch.ones(4)).to(x.device) + x,
    "through NumPy and back": lambda x: torch.from_numpy(x.cpu().numpy() * 2).to(x.device) + x,
    "a device that may be a GPU": lambda x: x + torch.ones(4, device="cpu"),
    "a module": torch.nn.Linear(4, 2),
    "a module of a global variable": lambda x: NORM(x[None]),
    "lengths on the CPU": lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[1],
    "its device is where it is": lambda x: x if x.device == torch.device("cpu") else None,
    "compared": lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
}


def _assigned(x):
    x[1:3] = torch.zeros(2)
    x[torch.tensor([0])] = 5.0
    return x


@pytest.mark.parametrize("fn", ACCEPTED.values(), ids=ACCEPTED)
def test_what_a_gpu_accepts_is_accepted_and_gives_the_same_bits(fn):
    def task(x):
        return fn(x).clone()

    if isinstance(fn, torch.nn.Module):
        task = fn
    with torch.no_grad():
        expected = task(X.clone())
    assert torch.equal(result(task), expected)


def test_tasks_on_the_cpu_and_machines_of_cpus_are_free():
    assert torch.equal(result(sums_on_the_cpu, on="cpu"), 2 * X)
    cpus = asc.Machine([asc.Device("cpu", streams=2)], imagined=True)
    assert torch.equal(result(sums_on_the_cpu, on="cpu", machine=cpus), 2 * X)


@pytest.mark.parametrize("how", ["positional", "keyword", "merged"])
def test_here_is_the_device_of_the_task(how):
    def task(x, device):
        return x + torch.arange(4.0, device=device)

    graph = asc.Graph()
    x, here = graph.input("x"), asc.Here("cpu")
    with graph.on("cuda:1"):
        y = graph.add(task, x, device=here) if how == "keyword" else graph.add(task, x, here)
        graph.output(y=graph.add(torch.add, y, graph.add(torch.ones, 4, device=here)))
    if how == "merged":
        graph = asc.merge(graph, {task.name: "all" for task in graph.tasks})
    with asc.schedule(graph, TWO_GPUS) as schedule:
        assert torch.equal(schedule(x=X)["y"], 2 * X + 1)


def test_outputs_of_a_run_are_inputs_of_the_next():
    with (
        scheduled(lambda x: x * 2) as schedule,
        scheduled(lambda x: x + torch.ones(4), on="cpu") as other,
    ):
        x = X
        for _ in range(3):
            x = other(x=schedule(x=x)["y"])["y"]
    assert torch.equal(x, 8 * X + 7)


def test_attention_takes_its_fast_path_while_it_is_watched():
    """It asks whether a mode of torch is active, and its other path differs in the last bits."""
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
    ).eval()
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    seen = torch.overrides.has_torch_function
    with torch.no_grad():
        expected = encoder(x)
    with scheduled(encoder, check=True) as schedule:
        for _ in range(2):
            assert torch.equal(schedule(x=x)["y"], expected)
    assert torch.overrides.has_torch_function is seen


def test_other_threads_do_not_notice():
    inside, go_on = threading.Event(), threading.Event()

    def held(x):
        inside.set()
        assert go_on.wait(30)
        return x + 1

    with scheduled(held) as schedule:
        caller = threading.Thread(target=schedule, kwargs={"x": X})
        caller.start()
        assert inside.wait(30)
        assert not torch.overrides.has_torch_function((X,))
        assert torch.equal(X + torch.arange(4.0), 2 * X)
        go_on.set()
        caller.join()


def test_what_a_step_that_was_captured_makes_is_where_its_tasks_are():
    def step(x):
        mask = torch.tril(torch.ones(4, 4))
        return (x * mask + torch.arange(4.0, device=x.device)).softmax(-1)

    with asc.compile(step, TWO_GPUS, policy="round_robin", check=True) as compiled:
        for _ in range(2):
            assert torch.equal(compiled(X), step(X))
