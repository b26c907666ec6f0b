"""Pipelines and model parallelism: bit for bit what micro-batches leave that are trained on one after another."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autosched as asc
from autosched.graph.task import Origin
from autosched.parallel.named_orders import ORDERS
from autosched.parallel.stages import balanced, blocks_of
from autosched.parallel.template import pass_of
from tests.parallel.networks import chain, deep
from tests.serial import (
    Make,
    among,
    assert_trains_as_serially,
    model_parallel,
    momentum,
    pipeline,
    some,
    vectors,
)

PAIR = asc.Machine.emulated(gpus=2)


# ---- equal to micro-batches one after another


@pytest.mark.parametrize("name", some(ORDERS, "1f1b", "zb-v", "best"))
def test_every_order_trains_as_micro_batches_one_after_another(name: str) -> None:
    make = pipeline(2, schedule=name, chunks=4, memory=4)
    assert_trains_as_serially(make, among(1, 4), chain(4), vectors(8, 7))


def test_an_order_of_the_users_own_is_kept() -> None:
    mine = asc.parallel.order("zb-h2", 2, 4, memory=3)
    make = pipeline(2, schedule=mine, chunks=4)
    assert_trains_as_serially(make, among(1, 4), chain(4), vectors(8, 3))  # fewer: the first ones
    model = chain(4)
    with make(model, functional.cross_entropy, momentum(model.parameters())) as step:
        schedule = step.schedule(*next(vectors(8)))
    for rank, row in enumerate(mine.rows):
        tasks = [f"m{action.chunk}.{action.kind}{action.stage}" for action in row]
        issued = [name for name in schedule.placement.order if name in tasks]
        assert issued == tasks, rank


# ---- unusual models


class Sampled(nn.Module):
    """Draws random numbers by what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.sigmoid(x.detach()))


@pytest.mark.parametrize("order", ["interleaved", "auto"])
def test_orders_that_change_random_numbers_are_omitted_or_rejected(order: str) -> None:
    model, (batch,) = (
        nn.Sequential(*(layer for part in deep() for layer in (part, Sampled()))),
        vectors(12),
    )
    with pipeline(2, schedule=order, chunks=3)(
        model, functional.cross_entropy, momentum(model.parameters())
    ) as step:
        if order == "auto":
            orders = {one.order for one in step.curve(*batch, chunks=[3]).tried}
            assert "gpipe" in orders
            assert "interleaved" not in orders
            step(*batch)
        else:
            with pytest.raises(asc.ScheduleError, match=r"sequences contradict the graph: .m2\.F0"):
                step(*batch)


# ---- predictions


def wide(
    layers: int = 8, width: int = 256, rows: int = 64
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return equal layers, and a batch for them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch = torch.randn(rows, width)
    return model, (batch, batch)


def test_in_zero_bubble_gradients_of_weights_are_apart_in_all_micro_batches() -> None:
    torch.manual_seed(0)
    fold = [nn.Unflatten(1, (2, 4)), nn.Flatten()]  # views, between stages too
    model = nn.Sequential(
        *(part for _ in range(8) for part in (nn.Linear(8, 8, bias=False), *fold))
    )
    batch = torch.randn(6, 8), torch.randn(6, 8)
    with pipeline(2, schedule="zb-v", chunks=3)(
        model, functional.mse_loss, momentum(model.parameters())
    ) as step:
        tasks = step.schedule(*batch).graph.tasks
    products = {
        task.name: [part.name.split(".")[0] for part in task.parts if part.name.rpartition(".")[2].startswith("mm")]
        for task in tasks if task.name[3:4] in "IW"
    }  # fmt: skip
    for chunk in range(3):
        apart = [products[f"m{chunk}.W{stage}"] for stage in range(4)]
        assert sorted(itertools.chain(*apart), key=int) == [str(3 * layer) for layer in range(8)]
        for stage in range(1, 4):
            assert products[f"m{chunk}.I{stage}"] == apart[stage]  # of the input, as many


class Recomputed(nn.Sequential):
    """Keeps its input, and computes all else again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_1f1b_holds_less_than_gpipe_and_checkpoints_less_than_all() -> None:
    torch.manual_seed(0)
    parts = [(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()) for _ in range(8)]
    plain = nn.Sequential(*itertools.chain(*parts))
    again = nn.Sequential(
        *(Recomputed(*a, *b) for a, b in zip(parts[::2], parts[1::2], strict=True))
    )
    x = torch.randn(8000, 16)

    def peak(order: str, model: nn.Module) -> float:
        """Return the predicted bytes of the device that needs most."""
        optimizer = optim.SGD(model.parameters(), 0.1)
        with pipeline(4, schedule=order, chunks=8)(model, functional.mse_loss, optimizer) as step:
            return step.curve(x, x, chunks=[8]).tried[0].nbytes

    assert peak("1f1b", plain) < 0.75 * peak("gpipe", plain)
    assert peak("gpipe", again) < 0.75 * peak("gpipe", plain)


@pytest.mark.slow
def test_the_number_of_micro_batches_is_the_best_of_the_curve() -> None:
    model, batch = wide(8, 64, rows=4096)
    with pipeline(4, chunks="auto")(
        model, functional.mse_loss, momentum(model.parameters())
    ) as step:
        notes, curve = step.notes(*batch), step.curve(*batch)
        chosen = step.schedule(*batch)
    assert (notes["order"], notes["chunks"]) == (curve.best.order, curve.best.chunks)
    assert curve.best.seconds == min(one.seconds for one in curve.tried)
    assert curve.best.chunks > 1
    assert f"{curve.best.order} with {curve.best.chunks} micro-batch" in str(curve)
    assert "<- best" in str(curve)
    assert chosen.makespan == pytest.approx(curve.best.seconds, rel=0.5)  # and with updates


def test_stages_are_those_whose_slowest_is_fastest() -> None:
    torch.manual_seed(0)
    machine = asc.Machine.emulated(gpus=3)
    for seed in range(2):
        widths = [int(2 ** (5 + 4 * torch.rand(()).item())) for _ in range(8)]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        batch = torch.randn(512, widths[0]), torch.randn(512, widths[-1])
        optimizer = optim.SGD(model.parameters(), 0.1)
        one = pass_of(model, functional.mse_loss, optimizer, batch, weight=1.0)
        costs = asc.Costs.estimate(one.graph, one.examples)
        blocks = blocks_of(one.graph)
        found = balanced(one.graph, costs, machine, machine.accelerators)
        seconds = [
            sum(
                costs.task_seconds(one.graph.tasks[i], machine.device("cuda:0"))
                for i in (*b.forward, *b.backward)
            )
            for b in blocks
        ]

        def longest(*cut: int) -> float:
            return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, len(seconds))))  # noqa: B023

        computing = min(longest(*cut) for cut in itertools.combinations(range(1, len(blocks)), 2))
        sending = max(machine.copy_seconds("cuda:0", "cuda:1", n) for n in found.nbytes)
        assert max(found.seconds) == pytest.approx(longest(*found.ends[:-1])), seed
        assert max(found.seconds) <= max(computing, sending) * (1 + 1e-9), seed


def test_a_backward_that_reads_what_a_later_block_makes_does_not_hinder_a_cut() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.ReLU())]
    model, batch = nn.Sequential(*layers), (torch.randn(16, 8), torch.randn(16, 8))
    make = pipeline(2, chunks=1, schedule="1f1b")
    with make(model, nn.MSELoss(), momentum(model.parameters())) as step:
        assert len(step.cuts(*batch)) == 2


class Branches(nn.Module):
    """Two branches whose lines take turns, of which the wide one is best cut alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.drop = nn.Linear(8, 32), nn.Linear(32, 4), nn.Dropout(0.3)
        self.narrow = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(*ends) for ends in ((32, 200), (200, 200), (200, 32)))

    def forward(self, x: Tensor) -> Tensor:
        x = u = v = self.stem(x)
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            u = narrow(self.drop(u))
            v = wide(v)
        return self.head(u + v)


def test_stages_may_run_blocks_in_another_order_than_the_model() -> None:
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer, other = (optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    torch.manual_seed(1)
    machine = asc.Machine.emulated(gpus=3)
    with asc.parallel.pipeline(
        model, nn.MSELoss(), optimizer, machine, chunks=4, schedule="1f1b", backend="virtual"
    ) as step:
        step(x, y)
        starts = [block.forward[0] for block in step.cuts(x, y).blocks]
    assert starts != sorted(starts)
    torch.manual_seed(1)
    for rows, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (functional.mse_loss(plain(rows), wanted) / 4).backward()
    other.step()
    for one, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("seed", range(12))
def test_stages_follow_what_they_need_and_the_slowest_is_as_fast_as_can_be(seed: int) -> None:
    """Layers of which each reads one or two earlier ones, and the cuts into two of all sets of them."""
    draw, graph = random.Random(seed), asc.Graph()
    made: list[asc.Value] = []
    reads = [draw.sample(range(i), min(i, draw.randint(1, 2))) for i in range(9)]
    seconds = [float(draw.randint(1, 9)) for _ in reads]

    def add(layer: int, phase: str, inputs: list[asc.Value]) -> asc.Value:
        origin = Origin(("", 0), str(layer), phase)
        half = {"seconds": seconds[layer] / 2, "nbytes": 0, "origin": origin}
        return graph.record(max, tuple(inputs), {}, name=f"{phase}_{layer}", **half)

    for layer, read in enumerate(reads):
        made.append(add(layer, "", [made[i] for i in read]))
    back: dict[int, asc.Value] = {}
    for layer in reversed(range(len(reads))):
        after = [back[i] for i, read in enumerate(reads) if layer in read]
        back[layer] = add(layer, "backward", [made[layer], *after])
    graph.output(y=back[0])
    machine = asc.Machine.emulated(gpus=2)
    found = balanced(graph, asc.Costs(), machine, machine.accelerators)
    stages = found.stages(graph)
    first = {i for i in range(len(reads)) if stages[f"_{i}"] == 0}
    ends = [
        chosen
        for count in range(1, len(reads))
        for chosen in map(set, itertools.combinations(range(len(reads)), count))
        if all({*reads[i]} <= chosen for i in chosen)
    ]
    work = [sum(seconds[i] for i in chosen) for chosen in ends]
    assert first in ends
    assert sum(seconds[i] for i in first) == found.seconds[0]
    assert all(stages[f"_{i}"] == stages[f"backward_{i}"] for i in range(len(reads)))
    assert max(found.seconds) == min(max(one, sum(seconds) - one) for one in work)


# ---- model parallelism


class Toy(nn.Module):
    """The tutorial's."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


MAP = {"net1": "cuda:0", "net2": "cuda:1"}


def test_a_users_map_says_where_modules_are() -> None:
    model = Toy()
    batch = torch.randn(20, 10), torch.randn(20, 5)
    make = model_parallel(split=MAP)
    with make(model, functional.mse_loss, momentum(model.parameters())) as step:
        tasks = step.schedule(*batch).graph.tasks
        devices = {task.name: task.device for task in tasks if task.name[0] in "FB"}
        assert devices == {"F0": "cuda:0", "B0": "cuda:0", "F1": "cuda:1", "B1": "cuda:1"}
        lines = [line.split() for line in str(step.cuts(*batch)).splitlines()]
        assert lines[0] == ["stage", "device", "blocks", "time", "sent", "on"]
        assert lines[1][:5] == ["0", "cuda:0", "net1", "...", "relu"]
    assert_trains_as_serially(make, among(1), model, [batch, batch], loss_fn=functional.mse_loss)
    make = pipeline(split=MAP, chunks=4)
    assert_trains_as_serially(make, among(1, 4), model, [batch, batch], loss_fn=functional.mse_loss)


# ---- what goes wrong


def refused(
    message: str, batch: tuple[Any, ...], make: Callable[..., Make] = pipeline, **options: Any
) -> None:
    model = chain(4)
    with (
        pytest.raises(asc.AutoschedError, match=message),
        make(**options)(model, functional.cross_entropy, momentum(model.parameters())) as step,
    ):
        step(*batch)


def test_invalid_arguments_of_pipelines_are_rejected() -> None:
    batch = next(vectors(6))
    refused("cut into 1 or more parts, got 0", batch, chunks=0)
    refused(
        "an Order, 'auto' or one of 'gpipe', '1f1b', 'interleaved', 'zb-h1', .*, got 'dapple'",
        batch,
        schedule="dapple",
    )
    refused(
        "12 stages need as many blocks of the model, and it has", batch, gpus=12, schedule="gpipe"
    )
    for make in (pipeline, model_parallel):
        refused(
            "split= names 'head', which matches no module that was called; there are 0, 1",
            batch,
            make,
            split={"head": "cuda:0"},
        )
        refused("no device 'cuda:7'", batch, make, split={"0": "cuda:7"})
    refused("stages= of order 'gpipe' must be 1, got 2", batch, schedule="gpipe", stages=2)
    refused("holds .* 6 micro-batches .* memory=2", batch, schedule="gpipe", memory=2, chunks=6)
    mine = asc.parallel.order("zb-v", 2, 4)
    refused(
        "schedule= is for 2 devices and 4 micro-batches, not for 2 and 3",
        batch,
        schedule=mine,
        chunks=3,
    )
    refused("has other stages than stages=1 per device", batch, schedule=mine, chunks=4, stages=1)
    refused("zb-v' holds .* more than memory=1", batch, schedule=mine, chunks=4, memory=1)
    back = {"0": "cuda:0", "2": "cuda:1", "4": "cuda:0", "6": "cuda:1"}
    refused(
        "'1f1b' cannot run the stages of split=, on cuda:0, cuda:1, cuda:0, cuda:1",
        batch,
        split=back,
        schedule="1f1b",
    )


def test_forward_alone_is_for_compile() -> None:
    with pytest.raises(
        asc.ScheduleError, match=r"for forward alone, use autosched.compile\(model, m"
    ):
        asc.parallel.model_parallel(Toy(), PAIR)
    model, x = Toy().eval(), torch.randn(20, 10)
    with torch.no_grad(), asc.compile(model, PAIR, place=MAP, backend="virtual") as run:
        assert torch.equal(run(x), model(x))
        assert {*run.schedule(x).placement.device.values()} == {"cuda:0", "cuda:1"}


def limited(nbytes: float, gpus: int = 2) -> asc.Machine:
    found = asc.Machine.emulated(gpus=gpus)
    devices = [
        dataclasses.replace(d, nbytes=nbytes if d.name != "cpu" else d.nbytes)
        for d in found.devices
    ]
    return dataclasses.replace(found, devices=tuple(devices))


LAYER = 4.0 * 64 * 64  # bytes
HOLDING: dict[str, tuple[Any, float]] = {  # and how many of four layers each of two devices holds
    "data_parallel": (lambda *trained, **how: asc.parallel.data_parallel(*trained, **how), 4),
    "pipeline": (lambda *trained, **how: asc.parallel.pipeline(*trained, chunks=2, **how), 2),
    "model_parallel": (
        lambda model, loss_fn, optimizer, machine: asc.parallel.model_parallel(
            model,
            machine,
            loss_fn=loss_fn,
            optimizer=optimizer,
            split={"[01]": "cuda:0", "*": "cuda:1"},
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", HOLDING)
def test_peak_memory_has_model_gradients_and_optimizer_state(name: str) -> None:
    make, layers = HOLDING[name]
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    batch = torch.randn(2, 64), torch.randn(2, 64)
    with make(
        model, functional.mse_loss, optim.AdamW(model.parameters()), asc.Machine.emulated(gpus=2)
    ) as step:
        for moments in (0, 2):  # in the first step, the optimizer has none yet
            schedule = step.schedule(*batch)
            course = {device: dict(points) for device, points in schedule.memory().items()}
            for device in ("cuda:0", "cuda:1"):
                assert course[device][0.0] >= layers * LAYER * (1 + moments)
                assert schedule.peak_bytes[device] >= layers * LAYER * (2 + moments)
                assert schedule.peak_bytes[device] < layers * LAYER * (
                    2 + 2 + 3
                )  # copies of gradients, and sums
            step(*batch)


@pytest.mark.parametrize("name", HOLDING)
def test_too_little_memory_for_future_state_is_rejected_before_the_first_step(
    name: str,
) -> None:
    make, layers = HOLDING[name]
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    kept = copy.deepcopy(model.state_dict())
    machine = limited(
        layers * LAYER * 2.9
    )  # for weights and moments it takes 3 times as much as for weights
    with (
        pytest.raises(asc.ScheduleError, match="memory"),
        make(model, functional.mse_loss, optim.AdamW(model.parameters()), machine) as step,
    ):
        step(torch.randn(2, 64), torch.randn(2, 64))
    torch.testing.assert_close(dict(model.state_dict()), dict(kept), rtol=0, atol=0)


def test_a_reduction_that_does_not_fit_is_not_chosen() -> None:
    """Summed on one device gradients of all replicas meet there."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    batch = torch.randn(4, 64), torch.randn(4, 64)

    def planned(machine: asc.Machine, reduction: str = "auto") -> asc.Schedule:
        return asc.parallel.data_parallel(
            model,
            functional.mse_loss,
            optim.SGD(model.parameters(), 0.1),
            machine,
            reduction=reduction,
        ).schedule(*batch)

    roomy = {
        name: max(planned(asc.Machine.emulated(gpus=4), name).peak_bytes.values())
        for name in ("sum", "exchange")
    }
    limit = 0.99 * roomy["sum"]
    assert roomy["exchange"] < limit
    assert max(planned(limited(limit, gpus=4)).peak_bytes.values()) <= limit


def test_a_model_that_fits_nowhere_is_refused() -> None:
    message = "no cut leaves each device with no more than its memory"
    refused(message, next(vectors(6)), machine=limited(1000))


def test_a_batch_that_does_not_fit_is_trained_in_micro_batches_or_keeps_to_the_limit() -> None:
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4)
    )
    batch = torch.randn(64, 8), torch.randint(0, 4, (64,))

    def curve(nbytes: float) -> Any:
        optimizer = optim.SGD(model.parameters(), 0.1)
        step = asc.parallel.pipeline(
            model, functional.cross_entropy, optimizer, limited(nbytes), schedule="1f1b"
        )
        return step.curve(*batch, chunks=[1, 16])

    roomy = curve(1e9)
    whole, parts = roomy.tried
    limit = (whole.nbytes + parts.nbytes) / 2
    assert parts.nbytes < limit < whole.nbytes
    assert roomy.best == whole
    tight = curve(limit)
    assert [one.fits for one in tight.tried[:2]] == [False, True]
    assert tight.best.nbytes <= limit
    assert whole.seconds <= tight.best.seconds <= parts.seconds
    (again,) = tight.tried[2:]
    assert (again.order, again.chunks, again.fits) == ("1f1b", 1, True)


def test_the_best_order_fits_into_the_memory_of_devices() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    batch = torch.randn(4096, 16), torch.randn(4096, 16)

    def tried(machine: asc.Machine, memory: float | None = None) -> Any:
        make = pipeline(2, machine=machine, schedule="best", chunks=8, memory=memory)
        with make(model, functional.mse_loss, optim.SGD(model.parameters(), 0.1)) as step:
            return step.curve(*batch, chunks=[8]).best

    roomy, least = tried(limited(1e9)), tried(limited(1e9), memory=1)
    limit = (roomy.nbytes + least.nbytes) / 2
    tight = tried(limited(limit))
    assert least.nbytes <= tight.nbytes <= limit < roomy.nbytes
    assert roomy.seconds <= tight.seconds <= least.seconds
