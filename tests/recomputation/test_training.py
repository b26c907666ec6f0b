"""Training steps with half of the memory of their activations, of which torch knows the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.frontends import capture
from autosched.scheduling.saved import from_text
from autosched.scheduling.schedule import joined
from autosched.simulated_gpus import playing

Job = tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]


class Block(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        weights = nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, True)
        mixed = (weights @ v).transpose(1, 2).reshape(rows, length, width)
        x = x + nn.functional.dropout(self.out(mixed), 0.1, True)
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def perceptron() -> tuple[nn.Module, Tensor]:
    hidden = [(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*sum(hidden, ()), nn.Linear(32, 10)), torch.rand(512, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    blocks = [Block(16)]
    model = nn.Sequential(nn.Embedding(20, 16), *blocks, nn.Linear(16, 10), nn.Flatten(0, 1))
    return model, torch.randint(20, (16, 32))


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [(nn.Conv2d(3 if not i else 8, 8, 3, padding=1), nn.SiLU()) for i in range(4)]
    return nn.Sequential(*sum(layers, ()), nn.Flatten(), nn.Linear(512, 10)), torch.rand(
        32, 3, 8, 8
    )


def job(make: Callable[[], tuple[nn.Module, Tensor]]) -> Job:
    """Return a step that has made the state of its optimizer."""
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(10, (x.numel() if x.dtype == torch.int64 else len(x),), device=x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(x, y)
    return model, step, x, y


def trained(model: nn.Module, step: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """Return five losses, and the weights after them."""
    torch.manual_seed(1)
    return [*(step(x, y).clone() for _ in range(5)), *model.state_dict().values()]


def half(free: asc.Schedule, device: str) -> float:
    """Return what is there before a run, and half of what a run adds."""
    start = free.memory()[device][0][1]
    return start + (free.peak_bytes[device] - start) / 2


def in_blocks(made: asc.Schedule) -> float:
    """Return the peak on a GPU, whose blocks are rounded up to 512 bytes."""
    sizes = {v.name: made.costs.value_nbytes(v) for v in made.graph.values}
    costs = made.costs.override(nbytes={name: -(-n // 512) * 512 for name, n in sizes.items()})
    return replace(made, problem=replace(made.problem, costs=costs)).peak_bytes["cuda:0"]


@pytest.mark.parametrize("make", [perceptron, transformer, convolutions])
def test_steps_with_half_the_memory_equal_eager_ones(make: Any) -> None:
    expected = trained(*job(make))
    model, step, x, y = job(make)
    graph = asc.capture(step, x, y)
    how: Any = {"examples": graph.feed(x, y), "place": {"*": "cuda:0"}}
    machine = asc.Machine.emulated(gpus=1, bytes_per_second=1e8).slower(1000)
    free = asc.schedule(graph, machine, **how)
    made = asc.schedule(graph, machine.limited(half(free, "cuda:0")), **how, backend="host")
    assert made.peak_bytes["cuda:0"] <= half(free, "cuda:0")
    assert made.recomputed
    assert not free.recomputed
    loaded = joined(from_text(made.text), graph)
    assert (loaded.recomputed, loaded.lower_bound) == (made.recomputed, made.lower_bound)
    assert made.lower_bound == free.lower_bound
    found = trained(model, lambda x, y: graph.finish(made(x, y)), x, y)
    assert all(map(torch.equal, found, expected))


def test_a_compiled_step_keeps_to_its_memory_on_a_played_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(capture, "check_modes", lambda: None)

    def run(memory: float | None) -> tuple[list[Tensor], float, asc.Schedule]:
        with playing(gpus=1):
            with torch.device("cuda"):
                model, step, x, y = job(perceptron)
            with asc.compile(
                step, asc.Machine.local(), memory=memory, place={"*": "cuda:0"}
            ) as compiled:
                found = [item.cpu() for item in trained(model, compiled, x, y)]
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                compiled(x, y)
                torch.cuda.synchronize()
                return found, torch.cuda.max_memory_allocated(), compiled.schedule(x, y)

    expected, most, free = run(None)
    found, peak, made = run(limit := half(free, "cuda:0"))
    assert made.recomputed
    assert made.peak_bytes["cuda:0"] <= limit
    scratch = 2048  # of running tasks, which is not counted
    assert peak - scratch <= in_blocks(made) < most
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), "8GB", True])
def test_a_wrong_memory_is_said(memory: Any) -> None:
    with pytest.raises(asc.MachineError, match="memory must be bytes above 0, such as 24e9"):
        asc.compile(nn.Linear(2, 2), asc.Machine.emulated(), memory=memory)
