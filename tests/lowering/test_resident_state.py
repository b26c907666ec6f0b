"""State of captured steps is on the devices that read it, so runs copy none of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autosched as asc
from autosched.program.program import Copy
from autosched.scheduling.planning import problem_of

MACHINE = asc.Machine.emulated(gpus=2)
X = torch.linspace(-1, 1, 8 * 64).reshape(8, 64)


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(count)])


def cut(*at: int) -> Callable[..., asc.Placement]:
    """Return a policy that places tasks on cuda:0, and on the other device at these positions."""

    def policy(problem: asc.Problem) -> asc.Placement:
        names = [task.name for task in problem.graph.tasks]
        side = [sum(i >= position for position in at) % 2 for i in range(len(names))]
        return asc.Placement({n: f"cuda:{s}" for n, s in zip(names, side, strict=True)}, (*names,))

    return policy


def planned(graph: asc.Graph, machine: asc.Machine = MACHINE, **options: object) -> asc.Schedule:
    options = {"backend": "virtual", "examples": graph.examples, **options}
    return asc.schedule(graph, machine, **options)


def copied(schedule: asc.Schedule) -> list[str]:
    """Return the names of what is copied in each run."""
    return [item.value for item in schedule.program if isinstance(item, Copy)]


def with_memory(nbytes: float) -> asc.Machine:
    devices = [d if d.kind == "cpu" else replace(d, nbytes=nbytes) for d in MACHINE.devices]
    return asc.Machine(devices, MACHINE.links)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def test_a_run_copies_the_batch_and_no_weights():
    model = layers(3)
    schedule = planned(asc.capture(model, X), asc.Machine.emulated(gpus=1), policy=cut())
    assert copied(schedule) == ["input"]
    assert {schedule.problem.constraints.inputs[name] for name, _ in model.named_parameters()} == {
        "cuda:0"
    }
    assert torch.equal(schedule(X)["result"], model(X))


def test_inference_under_torch_compile_copies_no_weights():
    model = layers(2)
    backend = asc.TorchBackend(asc.Machine.emulated(gpus=1), policy=cut(), backend="virtual")
    run = torch.compile(model, backend=backend)
    assert torch.equal(run(X), model(X))
    (schedule,) = backend.schedules()
    assert copied(schedule) == ["args.0", "1.addmm"]  # the batch, and the result
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(run(X), model(X))
    torch._dynamo.reset()


def test_what_several_devices_read_is_on_each_of_them():
    layer = layers(1)[0]

    def twice(x: Tensor) -> Tensor:
        return layer(layer(x))

    schedule = planned(asc.capture(twice, X), policy=cut(2))
    assert str(schedule).splitlines()[:5] == [
        "input weight on cuda:0",
        "input bias on cuda:0",
        "input x on cpu",
        "input weight.cuda:1 on cuda:1",
        "input bias.cuda:1 on cuda:1",
    ]
    assert copied(schedule) == ["x", "addmm"]
    assert schedule.graph.input_names == ("weight", "bias", "x")
    for run in (schedule, schedule.run_serial, lambda x: schedule(**schedule.graph.feed(x))):
        assert torch.equal(run(X)["result"], twice(X))
    layer.weight.mul_(2)
    assert torch.equal(schedule(X)["result"], twice(X))


def test_a_view_of_state_is_where_it_is_read():
    schedule = planned(asc.capture(layers(2), X), policy=cut(1))  # after the view of the first
    assert schedule.placement.device["0.t"] == schedule.placement.device["0.addmm"] == "cuda:1"
    assert copied(schedule) == ["input"]


def test_state_is_not_kept_where_its_copy_would_differ():
    one, two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
    three, four = torch.zeros(4), nn.Parameter(torch.ones(4))
    model = nn.Module()
    model.one, model.two, model.four = one, two, four
    model.register_buffer("three", three)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        model.three.add_(x)  # is written
        # The first result shares memory, and the caller may write it.
        return model.one[1:], model.two.as_strided((2,), (3,)) + x[:2], model.four * x

    real = asc.Machine([asc.Device("cpu"), asc.Device("cuda:0")], [asc.Link("cpu", "cuda:0", 1e9)])
    graph = asc.capture(step, torch.ones(4))
    assert problem_of(graph, real).constraints.resident == ("four",)
    assert problem_of(graph, MACHINE).constraints.resident == ("four", "three")


def test_where_the_user_says_that_state_is_it_stays():
    graph = asc.capture(layers(1), X)
    schedule = planned(graph, inputs={"0.*": "cpu"}, policy=cut())
    assert {*copied(schedule)} == {"0.t", "0.bias", "input"}
    assert schedule.makespan > planned(graph, policy=cut()).makespan


def test_a_split_that_weights_would_not_be_worth_is_one_when_they_stay():
    """Each of two towers has 4 MB of weights, which take longer to copy than to use."""
    torch.manual_seed(0)
    towers = [nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]) for _ in range(2)]

    def both(x: Tensor) -> Tensor:
        return towers[0](x) + towers[1](x)

    x = torch.ones(512, 512)
    graph = asc.capture(both, x)
    staying = planned(graph)
    copying = planned(graph, inputs="cpu")
    names = {name for name, _ in itertools.chain(*(tower.named_parameters() for tower in towers))}
    assert not any(name.endswith(tuple(names)) for name in copied(staying))
    assert {*staying.placement.device.values()} == {"cuda:0", "cuda:1"}
    assert staying.makespan < copying.makespan / 2
    assert staying.lower_bound <= staying.makespan


@pytest.mark.parametrize("kib", [120, 80, 48])
def test_state_stays_as_far_as_memory_suffices(kib: int):
    model = layers(6)  # 6 times 16 KiB
    schedule = planned(asc.capture(model, X), with_memory(kib * 1024))
    assert max(schedule.peak_bytes[f"cuda:{i}"] for i in range(2)) <= kib * 1024
    assert torch.equal(schedule(X)["result"], model(X))
    assert schedule.lower_bound <= schedule.makespan


def test_state_that_fits_in_part_stays_in_part():
    model = layers(6)
    one = asc.Machine([*MACHINE.devices[:1], replace(MACHINE.devices[1], nbytes=60 * 1024)],
                      [link for link in MACHINE.links if "cuda:1" not in (link.source, link.destination)])  # fmt: skip
    schedule = planned(asc.capture(model, X), one, policy="single")
    kept = [name for name in schedule.problem.constraints.resident if name.endswith("weight")]
    assert 0 < len(kept) < 6
    assert schedule.peak_bytes["cuda:0"] <= 60 * 1024
    assert torch.equal(schedule(X)["result"], model(X))


def test_a_saved_schedule_keeps_the_same_state(tmp_path: Path):
    layer = layers(1)[0]

    def twice(x: Tensor) -> Tensor:
        return layer(layer(x))

    schedule = planned(asc.capture(twice, X), policy=cut(2))
    schedule.save(tmp_path / "plan.json")
    loaded = asc.load(tmp_path / "plan.json", asc.capture(twice, X))
    assert str(loaded) == str(schedule)
    assert loaded.problem.constraints.resident == schedule.problem.constraints.resident
    assert torch.equal(loaded(X)["result"], twice(X))
    with pytest.raises(asc.ScheduleError, match="is not the one that was saved"):
        asc.load(tmp_path / "plan.json", asc.capture(layers(3), X))


def test_the_graph_of_a_schedule_can_be_scheduled_on_another_machine():
    layer = layers(1)[0]

    def twice(x: Tensor) -> Tensor:
        return layer(layer(x))

    schedule = planned(asc.capture(twice, X), policy=cut(2))
    again = asc.schedule(schedule.graph, asc.Machine.emulated(gpus=1), policy=cut())
    assert copied(again) == ["x"]
    assert torch.equal(again(X)["result"], twice(X))
    pinned = asc.schedule(schedule.graph, MACHINE, policy=cut(), inputs={"bias": "cpu"})
    assert "bias" in copied(pinned)
    one = planned(asc.capture(layer, X), policy=cut())
    assert len(copied(asc.schedule(one.graph, MACHINE, policy=cut(), inputs="cpu"))) == 3
    again.close()
    pinned.close()


@settings(max_examples=max(8, settings().max_examples // 2))
@given(st.lists(st.integers(0, 8), max_size=4), st.sampled_from(["virtual", "host"]))
def test_law_a_step_with_shared_weights_equals_the_eager_one_for_each_placement(
    at: list[int], backend: str
) -> None:
    with torch.no_grad():
        layer = layers(1)[0]

        def step(x: Tensor) -> Tensor:
            part = layer.weight[:8]  # a view whose views are read, too
            return layer(layer(x).relu()) + (x @ part.t()).sum() + (x @ part.mT).sum()

        schedule = planned(asc.capture(step, X), policy=cut(*at), backend=backend)
        state = {"weight", "bias"}
        assert not any(name.partition(".")[0] in state for name in copied(schedule))
        assert torch.equal(schedule(X)["result"], step(X))
        layer.weight.copy_(layer.weight.t().clone())
        assert torch.equal(schedule(X)["result"], step(X))


# ---- state that is written


def trained(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a model and its training step, always the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    made = optimizer(model.parameters())

    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = model(x).square().mean()
            loss.backward()
            made.step()
            made.zero_grad()
        return loss

    return model, step


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_step_leaves_its_state_on_the_device(kind: str):
    eager, step = trained(OPTIMIZERS[kind])
    model, other = trained(OPTIMIZERS[kind])
    with torch.enable_grad(), asc.compile(other, MACHINE, policy=cut(), backend="host") as run:
        for _ in range(3):
            assert torch.equal(run(X), step(X))
            for one in (eager, model):  # the user reads and writes between steps
                with torch.no_grad():
                    one[0].weight.mul_(0.5)
                one.load_state_dict({k: v + 1 for k, v in one.state_dict().items()})
        for name, item in eager.state_dict().items():
            assert torch.equal(item, model.state_dict()[name]), name
        assert copied(run.schedule(X)) == ["x"]


@settings(max_examples=max(4, settings().max_examples // 5))
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from(sorted(OPTIMIZERS)))
def test_law_a_training_step_equals_the_eager_one_for_each_placement(
    at: list[int], kind: str
) -> None:
    with torch.no_grad():
        eager, step = trained(OPTIMIZERS[kind])
        model, other = trained(OPTIMIZERS[kind])
        assert torch.equal(step(X), other(X))
        graph = asc.capture(other, X)

        def policy(problem: asc.Problem) -> asc.Placement:
            return moved(cut(*at)(problem), problem.graph, problem.machine)

        schedule = planned(graph, policy=policy, backend="host")
        assert not any(isinstance(item, Copy) and item.overwrite for item in schedule.program)
        for _ in range(2):
            assert torch.equal(schedule(X)["result"], step(X))
        for name, item in eager.state_dict().items():
            assert torch.equal(item, model.state_dict()[name]), name


def moved(placement: asc.Placement, graph: asc.Graph, machine: asc.Machine) -> asc.Placement:
    """Return the placement with tasks that must share a device on that of the first."""
    found = asc.Problem(graph, machine).choices
    names = [task.name for task in graph.tasks]
    device = {}
    for name, group, possible in zip(names, found.group, found.devices, strict=True):
        wanted = placement.device[names[group]]
        device[name] = wanted if wanted in possible else possible[0]
    return replace(placement, device=device)
