"""Data parallel: bit for bit what the shares of each batch leave that are trained on one after another."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.all_reduce import STRATEGIES
from tests.frontends.test_capture import OPTIMIZERS
from tests.models import mlp
from tests.parallel.networks import clip_values, hooked, trained_by
from tests.serial import (
    Make,
    Rows,
    among,
    assert_equal,
    assert_trains_as_serially,
    data_parallel,
    momentum,
    pipeline,
    small,
    some,
    vectors,
)

PAIR = asc.Machine.emulated(gpus=2)


# ---- equal to the shares one after another


@pytest.mark.parametrize("reduction", some(STRATEGIES, "ring", "exchange"))
@pytest.mark.parametrize("gpus", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_replicas_have_the_same_bits_with_every_strategy(gpus: int, reduction: str) -> None:
    model, whole = small().double(), small().double()
    optimizer, other = momentum(model.parameters()), momentum(whole.parameters())
    with data_parallel(gpus, reduction=reduction, buckets=(100, 300))(
        model, functional.cross_entropy, optimizer
    ) as step:
        for x, y in vectors(9, 8, 9):
            loss, expected = step(x.double(), y), functional.cross_entropy(whole(x.double()), y)
            expected.backward()
            other.step()
            other.zero_grad()
            torch.testing.assert_close(loss, expected)
        inputs = step.inputs(x.double(), y)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name])
        for replica in range(gpus):
            assert torch.equal(inputs[f"r{replica}.{name}"], tensor), (name, replica)


@pytest.mark.parametrize(
    ("sizes", "count"), [((1,), 4), ((2**30,), 1), ((20, 50), 2), ([0], 4), ("auto", None)], ids=str
)
def test_buckets_change_no_bits(sizes: Any, count: int | None) -> None:
    assert_trains_as_serially(data_parallel(buckets=sizes), among(2), small(), vectors(6, 6))
    model = small()
    with data_parallel(buckets=sizes)(
        model, functional.cross_entropy, momentum(model.parameters())
    ) as step:
        notes = step.notes(*next(vectors(6)))
    assert count is None or len(notes["buckets"]) == count
    assert sorted(name for bucket in notes["buckets"] for name in bucket) == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]
    assert notes["tried"][min(notes["tried"], key=notes["tried"].get)] == min(
        notes["tried"].values()
    )


@torch.library.custom_op("autosched_tests::address", mutates_args=())
def address(tensor: Tensor) -> Tensor:
    """Return where in a line of the cache a tensor begins."""
    return torch.tensor(tensor.data_ptr() % 64 / 64)


@address.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(())


class Addresses(nn.Module):
    """Depends on where its input begins, as the last bits of a matrix kernel may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + address(x.detach()))


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (data_parallel(backend="host"), among(2)),
        (data_parallel(3, accumulate=2), among(3, 2)),
        (pipeline(2, replicas=2, schedule="gpipe"), among(2, 2)),
    ],
)
def test_rows_have_the_alignment_that_they_have_in_the_batch(
    make: Make, rows: Callable[[int], Rows]
) -> None:
    """A share of 5 rows of 7 numbers begins within a vector, and kernels gave it other last bits than its copy."""
    torch.manual_seed(0)
    assert_trains_as_serially(make, rows, Addresses(), list(vectors(10, 13, width=7)))


def test_replicas_have_the_alignment_of_the_model() -> None:
    """Libraries that flatten parameters leave them anywhere in memory."""
    model = nn.Linear(7, 4)
    model.weight.data = torch.randn(30)[1:29].view(7, 4).t()
    with data_parallel()(model, functional.cross_entropy, momentum(model.parameters())) as step:
        replica = step.inputs(*next(vectors(6, width=7)))["r1.weight"]
    assert replica.data_ptr() % 64 == model.weight.data_ptr() % 64 != 0
    assert replica.data_ptr() != model.weight.data_ptr()
    assert replica.stride() == model.weight.stride()
    assert torch.equal(replica, model.weight)


# ---- what models and losses are like


def norm(model: nn.Module, limit: float = 0.05) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def norm_(optimizer: optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(trained_by(optimizer), 0.05)


def test_gradients_may_be_changed_before_the_optimizer_steps() -> None:
    assert_trains_as_serially(
        data_parallel(clip_grad_norm=0.05), among(2), small(), vectors(6),
        hooked(momentum, clip_values), before_step=norm,
    )  # fmt: skip
    # Of one stage all gradients may be seen.
    whole = data_parallel(buckets=(100,))
    assert_trains_as_serially(whole, among(2), small(), vectors(6), hooked(momentum, norm_))


def average_(optimizer: optim.Optimizer, *_: Any) -> None:
    parameters = trained_by(optimizer)
    with torch.no_grad():
        parameters[-1].add_(parameters[0].mean())


@pytest.mark.parametrize(("when", "hook"), [("pre", norm_), ("post", average_)])
def test_hooks_that_mix_stages_are_refused(when: str, hook: Any) -> None:
    """Each stage was updated by what a hook makes of its own gradients alone."""
    model = small()
    optimizer = momentum(model.parameters())
    getattr(optimizer, f"register_step_{when}_hook")(hook)
    make = pipeline(split={"0": "cuda:0", "*": "cuda:1"})
    with (
        make(model, functional.cross_entropy, optimizer) as step,
        pytest.raises(
            asc.ScheduleError, match="a hook of the optimizer computes what one stage has"
        ),
    ):
        step(*next(vectors(6)))


def test_hooks_that_draw_and_other_limits_are_rejected() -> None:
    def noise(optimizer: optim.Optimizer, *_: Any) -> None:
        for parameter in trained_by(optimizer):
            parameter.grad.add_(torch.randn_like(parameter))

    cases = [
        (data_parallel(), "a hook of it, draws random numbers: replicas would draw different ones"),
        *(
            (data_parallel(clip_grad_norm=limit), "clip_grad_norm must be the largest norm, a num")
            for limit in (-1, "1")
        ),
    ]
    for make, message in cases:
        model = small()
        optimizer = hooked(momentum, noise)(model.parameters())
        with (
            pytest.raises(asc.ScheduleError, match=message),
            make(model, functional.cross_entropy, optimizer) as step,
        ):
            step(*next(vectors(6)))


def test_unknown_options_and_arguments_are_rejected_at_once() -> None:
    model, parallel = small(), asc.parallel
    trained = model, functional.cross_entropy, momentum(model.parameters())
    both = {"loss_fn": trained[1], "optimizer": trained[2]}
    data, pipe = parallel.data_parallel, parallel.pipeline
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: data(*trained, PAIR, place={"*": "cpu"}), "place=: data_parallel decides itself"),
        (lambda: data(*trained, PAIR, accumulate=0), "accumulate: a batch can be cut into 1 or mo"),
        (lambda: data(*trained, PAIR, buckets="large"), "sizes of buckets must be one or more num"),
        (lambda: data(model, trained[1], None, PAIR), "optimizer of data_parallel must be a t"),
        (lambda: data(model, None, trained[2], PAIR), "loss_fn of data_parallel must be a f"),
        (lambda: pipe(len, *trained[1:], PAIR), "model of pipeline must be a torch.nn.Module, got"),
        (lambda: pipe(*trained, PAIR, chunks=2.5), "chunks: a batch can be cut into 1 or more pa"),
        (
            lambda: parallel.model_parallel(model, PAIR, chunks=4, **both),
            "unexpected option chunks",
        ),
    ]
    for make, message in cases:
        with pytest.raises(asc.ScheduleError, match=re.escape(message)):
            make()


class Several(nn.Module):
    """Takes a dict and a number, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4)

    def forward(
        self, given: dict[str, Tensor], scale: Tensor, twice: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.words(given["words"]).mean(1) * scale
        return self.head(found), {"found": found * 2 if twice else found}


def test_batches_may_be_trees_and_scalars_are_not_cut() -> None:
    torch.manual_seed(0)

    def loss_fn(out: Any, target: Any) -> Tensor:
        return (
            functional.cross_entropy(out[0], target["y"])
            + (out[1]["found"] - target["z"]).square().mean()
        )

    def batch(rows: int) -> tuple[Any, ...]:
        target = {"y": torch.randint(0, 4, (rows,)), "z": torch.randn(rows, 4)}
        return {"words": torch.randint(0, 7, (rows, 3))}, torch.tensor(0.5), True, target

    given = [batch(5), batch(5), batch(4)]
    assert_trains_as_serially(data_parallel(), among(2), Several(), given, loss_fn=loss_fn)


def test_a_loss_that_sums_is_not_weighted() -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, reduction="sum")

    make = data_parallel(averages=False)
    assert_trains_as_serially(
        make, among(2), small(), vectors(5, 5), loss_fn=loss_fn, averages=False
    )


# ---- between steps


def other_data(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def another_parameter(model: nn.Module, optimizer: optim.Optimizer) -> None:
    old, model[0].bias = model[0].bias, nn.Parameter(model[0].bias.detach() + 1)
    parameters = optimizer.param_groups[0]["params"]
    parameters[:] = [model[0].bias if item is old else item for item in parameters]
    if old in optimizer.state:
        optimizer.state[model[0].bias] = optimizer.state.pop(old)


def looked(model: nn.Module, optimizer: optim.Optimizer) -> None:
    torch.manual_seed(7)
    model(torch.randn(5, 8))  # batch norm counts this


def dropping_less(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model[3].p *= 0.5


# The law of training has others.
CHANGES = [other_data, another_parameter, looked, dropping_less]


@pytest.mark.parametrize("change", CHANGES)
def test_replicas_follow_what_is_changed_between_steps(change: Any) -> None:
    assert_trains_as_serially(
        data_parallel(), among(2), mlp(), vectors(6, 6, 6, 6), OPTIMIZERS["adam"], between=change
    )


def test_gradients_that_the_model_had_are_not_counted_and_stay() -> None:
    model = small()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    plain = copy.deepcopy(model)
    assert_trains_as_serially(data_parallel(), among(2), model, vectors(6, 6))
    plain[0].weight.grad = None
    assert_trains_as_serially(data_parallel(), among(2), plain, vectors(6, 6))


def test_the_plans_used_last_are_cached() -> None:
    model = nn.Linear(8, 4)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    with data_parallel(1)(model, functional.cross_entropy, optimizer) as step:
        batch = next(vectors(6))
        first = step.schedule(*batch)
        step(*next(vectors(7)))
        with pytest.warns(RuntimeWarning, match=r"capture 3: batch.0: shape \(7, 8\) -> \(8, 8\)"):
            step(*next(vectors(8)))
        for other in vectors(*range(9, 15)):
            step(*other)
        assert step.schedule(*batch) is step.schedule(*batch)
        assert step.schedule(*batch) is not first


def planned(step: asc.parallel.step.Step) -> list[object]:
    """Return a list to which each plan of a step is added."""
    made, plan = [], step._plan
    step._plan = lambda *args: made.append(plan(*args)) or made[-1]
    return made


RATED = [  # torch's optimizers, but those that need other tensors, or data to decide
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    if name not in ("Optimizer", "LBFGS", "SparseAdam", "ASGD", "Adafactor", "RAdam", "Muon")
]


@pytest.mark.parametrize("how", [data_parallel, pipeline])
@pytest.mark.parametrize("name", some(RATED, "SGD", "AdamW"))
def test_a_rate_that_changes_in_each_step_is_an_input(name: str, how: Any) -> None:
    made: list[object] = []

    def make(*trained: Any) -> asc.parallel.step.Step:
        step = how()(*trained)
        made.append(planned(step))
        return step

    def slower(model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.param_groups[0]["weight_decay"] = 1e-3  # from 0 in some, which is another path

    rows = among(2) if how is data_parallel else among(1, 2)
    optimize = lambda parameters: getattr(optim, name)(parameters, lr=1e-2)  # noqa: E731
    assert_trains_as_serially(make, rows, small(), vectors(*[6] * 6), optimize, between=slower)
    assert len(made[0]) <= 3  # with the optimizer's state, and without; and for the other path


def test_a_scheduler_is_told_that_the_optimizer_steps() -> None:
    """It warned that it was called before the optimizer."""
    model = nn.Linear(8, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rates = optim.lr_scheduler.StepLR(optimizer, 1)
    with (
        warnings.catch_warnings(),
        data_parallel(1)(model, functional.cross_entropy, optimizer) as step,
    ):
        warnings.simplefilter("error", UserWarning)
        made = planned(step)
        for batch in vectors(6, 6, 6):
            step(*batch)
            rates.step()
        assert len(made) == 1


def test_what_needs_the_number_of_a_rate_is_planned_again_and_says_so() -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer = optim.Muon(model.parameters(), lr=0.1)
    with data_parallel(1)(model, functional.cross_entropy, optimizer) as step:
        for batch in vectors(6, 6):
            step(*batch)
            optimizer.param_groups[0]["lr"] *= 0.9
        with pytest.warns(RuntimeWarning, match="'data_parallel' is captured again, .* lr: 0.09"):
            step(*batch)


# ---- in time


def tower(layers: int = 4, width: int = 1024) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_gradients_are_summed_while_backward_goes_on() -> None:
    model = tower()
    x = torch.randn(512, 1024)
    with data_parallel(buckets=(1,))(
        model, functional.mse_loss, momentum(model.parameters())
    ) as step:
        timeline = step.schedule(x, x).simulate()
    spans = {(span.kind, span.name): span for span in timeline.spans}
    backward = [
        span for (kind, name), span in spans.items() if kind == "run" and name.startswith("r1.B.")
    ]
    assert len(backward) == 8  # weights and biases
    for number in range(4):
        there, back = spans["copy", f"r1.b{number}.flat"], spans["copy", f"b{number}.add.cuda:0"]
        assert there.start < max(span.start for span in backward), number
        assert number or any(span.start < back.end and back.start < span.end for span in backward)


# ---- what goes wrong


def refused(
    message: str, *batch: Any, make: Any = None, model: nn.Module | None = None, **options: Any
) -> None:
    model = small() if model is None else model
    loss_fn = options.pop("loss_fn", functional.cross_entropy)
    with pytest.raises(asc.AutoschedError, match=message):
        (make or data_parallel)(**options)(model, loss_fn, momentum(model.parameters()))(*batch)


def test_batches_that_cannot_be_cut_are_rejected() -> None:
    x, y = next(vectors(6))
    refused("one first dimension, of 1 or more, to be cut along; got 6, 5", x, y[:5])
    refused("got none", torch.tensor(1.0), torch.tensor(1))
    refused("got 0", x[:0], y[:0])


def test_unknown_names_are_refused() -> None:
    batch = next(vectors(6))
    known = "'auto' or one of 'sum', 'cpu', 'ring', 'exchange', 'gather', got 'star'"
    refused(known, *batch, reduction="star")
    refused("no device 'cuda:7'; it has 'cpu', 'cuda:0', 'cuda:1'", *batch, devices=["cuda:7"])
    refused(r"each once, got \['cuda:0', 'cuda:0'\]", *batch, devices=["cuda:0", "cuda:0"])


class Head(nn.Module):
    """A loss that has something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.layer(out).sum()


def test_losses_that_train_nothing_or_too_much_are_refused() -> None:
    batch = next(vectors(6))
    head = Head()
    refused("does not require grad", *batch, loss_fn=lambda out, y: out.detach().sum())
    none = "no gradient to any parameter that the opt"
    refused(none, *batch, loss_fn=lambda out, y: head(out.detach(), y))
    refused("loss_fn Head has parameters to train; make it a part of the mod", *batch, loss_fn=head)
    scalar = "grad can be implicitly created only for scalar outputs"
    refused(scalar, *batch, loss_fn=lambda out, y: out.sum(1))
    model = small()
    optimizer = momentum([*model.parameters(), *head.parameters()])
    why = r"the loss trains '.*layer.weight', which is no parameter of the model"
    with (
        data_parallel()(model, lambda out, y: head(out, y), optimizer) as step,
        pytest.raises(asc.GraphError, match=why),
    ):
        step(*batch)


# ---- compression


COMPRESSED = {
    "half": asc.parallel.Half(), "bfloat16": asc.parallel.Half(torch.bfloat16), "int8": asc.parallel.Int8(),
    "top k": asc.parallel.TopK(share=0.25),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_compression_errors_are_kept_as_residuals(name: str) -> None:
    """SGD without momentum applies the gradients: what it applies and what is kept are the uncompressed sum."""
    model, exact = small().double(), small().double()
    (x, y), rate = next(vectors(6)), 0.5
    with (
        data_parallel(compression=COMPRESSED[name])(
            model, functional.cross_entropy, optim.SGD(model.parameters(), rate)
        ) as step,
        data_parallel()(
            exact, functional.cross_entropy, optim.SGD(exact.parameters(), rate)
        ) as other,
    ):
        step(x.double(), y)
        other(x.double(), y)
        kept = sum(step.state_dict()["residuals"].values())
        order = [name for bucket in step.notes(x.double(), y)["buckets"] for name in bucket]
    found, expected = dict(model.named_parameters()), dict(exact.named_parameters())
    missing = torch.cat([(found[name] - expected[name]).flatten() for name in order])
    torch.testing.assert_close(missing, rate * kept, rtol=1e-9, atol=1e-12)
    assert 0 < missing.abs().max() < 0.5


@dataclasses.dataclass
class Batch:
    x: Tensor
    factor: float


@pytest.mark.parametrize("wrap", [lambda x: Batch(x, 2.0), lambda x: UserDict(x=x, factor=2.0)])
def test_batches_may_be_dataclasses_and_mappings(wrap: Callable[[Tensor], Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, batch: Any) -> Tensor:
            given = vars(batch) if isinstance(batch, Batch) else batch
            return self.net(given["x"] * given["factor"])

    plain, wrapped = Net(), Net()
    losses = []
    for model, batch_of in ((plain, lambda x: {"x": x, "factor": 2.0}), (wrapped, wrap)):
        optimizer = optim.SGD(model.parameters(), 0.1)
        step = asc.parallel.data_parallel(model, functional.cross_entropy, optimizer, PAIR)
        losses.append([step(batch_of(x), y) for x, y in vectors(6, 6, 4)])
    assert_equal(losses[1], losses[0], "wrapped")
    assert all(map(torch.equal, wrapped.parameters(), plain.parameters()))
