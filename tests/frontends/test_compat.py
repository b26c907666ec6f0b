"""What tracing lacks in older versions of torch: ours in its place says the same as torch's own in later versions."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import autosched as asc


def step_of(model: nn.Sequential, reentrant: bool):
    """Return a step whose backward adds up gradients, runs parts of forward again, and is run through itself."""

    def step(x: Tensor) -> Tensor:
        h = model[0](x)
        part = torch.utils.checkpoint.checkpoint(model[1:], h, use_reentrant=reentrant)
        loss = (part * h.sum()).sum() + (h * h).sum()
        if not reentrant:
            (slope,) = torch.autograd.grad(loss, h, create_graph=True)
            loss = loss + slope.pow(2).sum()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("reentrant", [False, True])
def test_tasks_come_from_the_same_module_phase_and_line(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    step, x = step_of(model, reentrant), torch.ones(3, 2)
    graph = asc.capture(step, x)
    monkeypatch.delattr(torch.compiler, "_patch_engine_backward", raising=False)
    older = asc.capture(step, x)
    assert {task.origin.module for task in older.tasks if task.origin.phase == "backward"} >= {
        "0",
        "1",
    }
    assert [(task.name, task.origin) for task in older.tasks] == [
        (task.name, task.origin) for task in graph.tasks
    ]


def test_a_generator_that_is_drawn_from_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.randn(2, generator=generator) * torch.rand(2, generator=generator)

    monkeypatch.delattr(torch.compiler, "_patch_engine_backward", raising=False)
    mine, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    graph = asc.capture(noisy, torch.ones(2), mine)
    for _ in range(2):
        out = graph.finish(graph.run_serial(**graph.feed(torch.ones(2), mine)))
        assert torch.equal(out, noisy(torch.ones(2), theirs))
