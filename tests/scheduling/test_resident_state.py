"""Copies of state on devices are made once, and again when the caller has changed it."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

import autosched as asc
from autosched._lib.copying import clone
from autosched.scheduling import kept_state
from autosched.simulated_gpus import playing
from tests.sample_policies import placed

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Moves:
    """Copies tensors to imagined devices as to physical ones, and counts that."""

    def __init__(self) -> None:
        self.count = 0
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Moves:
        names = asc.Machine.emulated(gpus=2).accelerators
        self.patch.setattr(
            "autosched.scheduling.kept_state.moves_to", lambda *_: dict.fromkeys(names, self.move)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def move(self, tensor: Tensor) -> Tensor:
        self.count += 1
        return clone(tensor)


@pytest.fixture
def moves() -> Iterator[Moves]:
    with Moves() as found:
        yield found


on_gpu = placed("cuda:0")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()


def compiled(fn: Callable[..., Tensor], **options: object) -> asc.Compiled:
    return asc.compile(fn, MACHINE, policy=on_gpu, backend="host", **options)


def run(model: Callable[..., Tensor], x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def test_the_second_call_copies_no_state(moves: Moves):
    model = net()
    step = compiled(model)
    assert torch.equal(run(step), run(model))
    assert moves.count == 8
    assert torch.equal(run(step), run(model))
    assert moves.count == 8


def test_calls_with_other_shapes_share_the_copies(moves: Moves):
    step = compiled(net())
    run(step)
    run(step, X[:2])
    assert (moves.count, step.cache_info().misses) == (8, 2)


def test_only_what_was_changed_is_copied_again(moves: Moves):
    model = net()
    step = compiled(model)
    run(step)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(run(step), run(model))
    assert moves.count == 9


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def by_data(model: nn.Sequential) -> None:
    model[2].weight.data = torch.randn_like(model[2].weight)


def by_strides(model: nn.Sequential) -> None:
    model[2].weight.data = model[2].weight.data.t()


def by_loading(model: nn.Sequential) -> None:
    model.load_state_dict({name: item + 0.5 for name, item in model.state_dict().items()})


def by_another(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def by_another_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(3, 3, dtype=model[0].weight.dtype)


def to_double(model: nn.Sequential) -> None:
    model.double() if model[0].weight.dtype == torch.float32 else model.float()


def by_statistics(model: nn.Sequential) -> None:
    """Torch updates them without a trace in their version counters."""
    x = torch.randn(4, 3, dtype=model[0].weight.dtype)
    nn.functional.batch_norm(x, model[1].running_mean, model[1].running_var, training=True)


def by_fused_optimizer(model: nn.Sequential) -> None:
    """Torch counts no version here, either."""
    model(torch.randn(4, 3, dtype=model[0].weight.dtype)).sum().backward()
    optim.AdamW(model.parameters(), fused=True).step()
    model.zero_grad()


def by_captured_step(model: nn.Sequential) -> None:
    """Nor where the same operator runs by a schedule."""
    optimizer = optim.AdamW(model.parameters(), fused=True)

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(4, 3, dtype=model[0].weight.dtype)
    train(x)
    with asc.schedule(asc.capture(train, x), MACHINE, backend="host") as step:
        step(x)


def by_reading(model: nn.Sequential) -> None:
    copy.deepcopy(model).state_dict()


CHANGES = (
    *(in_place, by_data, by_strides, by_loading, by_another, by_another_module, to_double),
    *(by_statistics, by_fused_optimizer, by_captured_step, by_reading),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(change: Callable[[nn.Sequential], None], moves: Moves):
    model = net()
    step = compiled(model)
    run(step)
    change(model)
    x = X.to(model[0].weight.dtype)
    assert torch.equal(run(step, x), run(model, x))


@settings(max_examples=max(6, settings().max_examples // 5))
@given(st.lists(st.sampled_from([*CHANGES[:-2], None]), max_size=6), st.booleans())
def test_law_calls_equal_the_eager_ones_under_all_changes(
    changes: list[Callable[[nn.Sequential], None] | None], is_physical: bool
) -> None:
    with Moves() if is_physical else pytest.MonkeyPatch.context():
        model = net()
        step = compiled(model, maxsize=2)
        for change in changes:
            if change is not None:
                change(model)
            x = X.to(model[0].weight.dtype)
            assert torch.equal(run(step, x), run(model, x))


def test_state_of_inference_mode_has_no_versions_and_is_copied_each_time(moves: Moves):
    with torch.inference_mode():
        layer = nn.Linear(3, 3)
        step = compiled(layer)
        for _ in range(2):
            layer.weight.add_(1)
            assert torch.equal(step(X), layer(X))


def test_state_that_shares_memory_with_what_is_written_is_refused(moves: Moves):
    module = nn.Module()
    memory = torch.ones(6)
    module.register_buffer("read", memory[:3].data)
    module.register_buffer("written", memory[3:].data)

    def step(x: Tensor) -> Tensor:
        module.written.add_(1)
        return x * module.read

    schedule = asc.schedule(asc.capture(step, X), MACHINE, policy=on_gpu, backend="host")
    assert torch.equal(schedule(X)["result"], X)
    module.written = memory[1:4].data
    with pytest.raises(asc.HazardError, match="'read' and 'written' share memory, and 'written'"):
        schedule(X)


def test_copies_go_when_no_schedule_needs_them(moves: Moves):
    step = compiled(net())
    run(step)
    assert kept_state._COPIES
    step.close()
    del step
    gc.collect()
    assert not kept_state._COPIES


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_has_state_after_the_first_call(seed: int):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        graph = asc.capture(model, X)
        expected = model(X)
        in_place(changed := copy.deepcopy(model))
        then = changed(X)
    with playing(1, seed=seed), torch.no_grad():
        schedule = asc.schedule(graph, asc.Machine.local(), policy=on_gpu)
        homes = Counter(device for _, device in schedule.program.inputs)
        assert homes == {"cuda:0": 4, "cpu": 1}
        for _ in range(2):
            assert torch.equal(schedule(X)["result"].cpu(), expected)
        in_place(model)
        assert torch.equal(schedule(X)["result"].cpu(), then)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        schedule.close()
