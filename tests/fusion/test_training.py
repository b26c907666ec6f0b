"""Fused training steps of every optimizer, compared with eager ones.

``training`` has the combinations of optimizers, options and networks. For each, five fused steps
are as close to eager ones as those of a model that ``torch.compile`` compiles, with an eager
optimizer; no kernel differs from its operators, and most tasks are fused.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.fusion.region import Region
from tests.fusion.regions import needs_compiler
from tests.fusion.training import (
    NETWORKS,
    REFUSED,
    Combination,
    Trainer,
    batches,
    covering,
    impossible,
    is_possible,
    optimizers,
    options_of,
    pairs_of,
    wanted,
)

CPU = asc.Machine.local(gpus=0)

# By precision, the part of a change that rounding can be; more is compared with torch.compile.
FLOOR = {"float32": 1e-4, "bfloat16": 2e-2}
NOISE = 4.0  # times the deviation of torch.compile, and of weights changed by a unit in last place
LEAST_SHARE = 0.5  # of the tasks, that is fused
LEAST = 1e-7  # a difference that is always small

State = dict[str, Any]


def trained(made: Combination, wrap: Callable[[Trainer], Callable[..., Tensor]]) -> State:
    """Return the losses and all state after the steps."""
    trainer = Trainer(made)
    return trained_by(trainer, made, wrap(trainer))


def trained_by(trainer: Trainer, made: Combination, step: Callable[..., Tensor]) -> State:
    losses = []
    for x, y in batches(made.network):
        losses.append(step(x, y))
        trainer.advance()
    return trainer.state() | {"losses": torch.stack(losses)}


def eager(trainer: Trainer) -> Callable[..., Tensor]:
    return trainer.step


def disturbed(trainer: Trainer) -> Callable[..., Tensor]:
    """Return a step from weights that are changed by a unit in the last place.

    Half precision does not see that, so inputs are changed by one of its units.
    """
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps)
    if trainer.precision != "bfloat16":
        return trainer.step
    generator = torch.Generator().manual_seed(0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if x.is_floating_point():
            signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
            x = x * (1 + signs * torch.finfo(torch.bfloat16).eps)
        return trainer.step(x, y)

    return step


def by_torch(trainer: Trainer) -> Callable[..., Tensor]:
    """Return a step with a compiled model, and an eager optimizer.

    Muon's is compiled, too: it orthogonalizes in bfloat16, which rounds far more than a model does.
    """
    torch._dynamo.reset()  # beyond its limit of compilations, torch would run eagerly
    model = trainer.model
    trainer.model = torch.compile(model)
    if trainer.optimizer == "Muon":
        own = trainer.optimizers[0]
        own.step = torch.compile(own.step)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return trainer.step(x, y)

    trainer.state = functools.partial(_state_of, trainer, model)
    return step


def _state_of(trainer: Trainer, model: nn.Module) -> State:
    trainer.model = model
    return Trainer.state(trainer)


def deviations(found: State, expected: State) -> dict[str, float]:
    """Return by name how far tensors deviate, as the root of the mean square."""
    assert found.keys() == expected.keys()
    return {name: _norm(found[name], item) for name, item in expected.items()}


def _norm(one: Any, other: Any = 0.0) -> float:
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    alike = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(alike, 0.0, one - other).square().mean().sqrt())


def differing(made: Combination, found: State) -> list[str]:
    """Return what of the state differs from eager steps more than rounding explains."""
    before = Trainer(made).state()
    expected = trained(made, eager)
    floor = FLOOR[made.precision]
    errors = deviations(found, expected)

    def scale(name: str) -> float:
        return _norm(expected[name], before.get(name, 0.0))

    far = [name for name, error in errors.items() if not error <= floor * scale(name) + LEAST]
    if not far:
        return []
    others = [trained(made, wrap) for wrap in (by_torch, disturbed)]
    noise = [deviations(other, expected) for other in others]
    return [
        f"{name}: {errors[name]:.2g} of {scale(name):.2g}, {[f'{n[name]:.2g}' for n in noise]}"
        for name in far
        if not errors[name] <= NOISE * max(each[name] for each in noise)
    ]


def first(schedules: list[Any], inputs: Mapping[str, Any]) -> list[float]:
    """Return run times of which the first is least: that of a fused graph."""
    return [float(i) for i in range(len(schedules))]


def check(made: Combination) -> None:
    """Raise an AssertionError if fused steps of a combination have a fault."""
    report = Report(made)
    assert report.faults() == []
    assert report.share >= LEAST_SHARE, f"tasks that are not fused: {report.not_fused}"


class Report:
    """What became of a combination: differences, warnings, and tasks that are not fused."""

    def __init__(self, made: Combination):
        self.made = made
        self.share = 0.0
        self.not_fused: dict[str, str] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with mock.patch("autosched.fusion.fusing.run_times", first):
                self.found = trained(made, self._fused)
                self._look()
                self.run.close()
        self.warnings = [str(item.message) for item in caught]
        self.differing = differing(made, self.found)

    def _fused(self, trainer: Trainer) -> Callable[..., Tensor]:
        self.run = asc.compile(trainer.step, CPU, fuse=True)
        return self.run

    def _look(self) -> None:
        made = self.run._known.values()[-1].schedule
        fused = tasks = 0
        for task in made.graph.tasks:
            if not task.view:
                parts = [part for part in task.parts if not part.view] or [task]
                tasks += len(parts)
                fused += len(parts) * isinstance(task.fn, Region)
        self.not_fused = dict(made.not_fused)
        self.share = fused / tasks

    def faults(self) -> list[str]:
        wrong = [text for text in self.warnings if "differ from the operators" in text]
        return wrong + self.differing


# ---- the combinations


def test_options_that_torch_refuses_need_an_accelerator_or_parameters_that_are_no_leaves() -> None:
    refused = impossible()
    names = {key.partition(".")[2].partition("=")[0] for key in refused}
    assert names == {"capturable", "differentiable"}


def test_a_new_option_of_an_optimizer_needs_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(torch.optim.SGD):
        def __init__(self, params: Any, warmth: float = 1.0):
            super().__init__(params)

    monkeypatch.setitem(optimizers(), "New", New)
    with pytest.raises(KeyError, match="warmth"):
        options_of("New")


@pytest.mark.slow
def test_all_pairs_of_options_are_in_at_most_200_combinations() -> None:
    found = covering()
    assert len(found) <= 200
    left = set(wanted()).difference(*map(pairs_of, found))
    assert {frozenset(name for name, _ in pair) for pair in left} == EXCLUSIVE
    assert all(is_possible(made) for made in found)


EXCLUSIVE = {
    frozenset(names)
    for names in [
        ("foreach", "fused"),
        ("foreach", "capturable"),  # on a CPU
        ("fused", "capturable"),  # which needs it there
        ("nesterov", "dampening"),
        ("nesterov", "momentum"),  # which it needs
    ]
}


# ---- the steps


SAMPLE = [
    Combination("Adam", "embedding", options=(("foreach", 0),)),
    Combination("AdamW", "mlp", "bfloat16", "cycle"),
    Combination("RMSprop", "mlp", groups="two", options=(("weight_decay", 0), ("centered", 0))),
]


@needs_compiler
@pytest.mark.parametrize("made", SAMPLE, ids=str)
def test_fused_steps_are_eager_ones(made: Combination) -> None:
    check(made)


@functools.cache
def sources() -> str:
    """Return a digest of what decides whether a combination passes."""
    files = [*Path(asc.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*training.py")]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", optimizers())
def test_fused_steps_of_all_optimizers_are_eager_ones(
    optimizer: str, network: str, pytestconfig: pytest.Config
) -> None:
    """Those that passed with the same sources and torch are not run again."""
    passed = pytestconfig.cache.mkdir("training")  # type: ignore[union-attr]
    failed = {}
    for made in covering():
        if (made.optimizer, made.network) != (optimizer, network):
            continue
        mark = passed / hashlib.sha256(f"{made} {sources()}".encode()).hexdigest()
        if mark.exists():
            continue
        try:
            check(made)
        except Exception as error:
            failed[str(made)] = str(error)
        else:
            mark.touch()
    assert failed == {}


# ---- without fusion


def assert_equal_eager(made: Combination) -> None:
    """Raise an AssertionError if captured steps are not, bit for bit, eager ones."""
    machine = asc.Machine.emulated(gpus=1)
    expected = trained(made, eager)
    found = trained(made, lambda trainer: asc.compile(trainer.step, machine, backend="host"))
    far = {name: error for name, error in deviations(found, expected).items() if error}
    assert not far, str(made)


def test_captured_steps_are_eager_ones() -> None:
    assert_equal_eager(Combination("NAdam", "gru", "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", optimizers())
def test_captured_steps_of_all_optimizers_are_eager_ones(optimizer: str) -> None:
    for made in covering():
        if made.optimizer == optimizer:
            assert_equal_eager(made)


# ---- what cannot be captured


def searching(optimizer: Any, loss: Callable[[], Tensor]) -> Tensor:
    found = optimizer.step(loss)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_whose_steps_are_not_captured(name: str) -> None:
    model = nn.Embedding(5, 2, sparse=name == "SparseAdam")
    optimizer = getattr(torch.optim, name)(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        made = model(torch.tensor([1, 3])).square().mean()
        made.backward()
        return made

    def steps() -> None:
        with asc.compile(lambda: searching(optimizer, loss), CPU) as run:
            run()
            run()  # with state

    with pytest.raises(asc.CaptureError) as error:
        steps()
    assert REFUSED[name] in str(error.value)


def test_a_weight_decay_that_is_a_tensor_is_not_captured() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=torch.tensor(0.1))

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    with asc.compile(step, CPU) as run, pytest.raises(asc.CaptureError):
        run(torch.ones(1, 3))
