"""What ranks give to each other of their state: in host memory, and back where it was."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn, optim

from autosched.parallel.ranks import SharedState


class Giving:
    """An agreement of a rank that gives its state, or with ``given`` of one that gets it."""

    def __init__(self, given: Any = None):
        self.given = given

    def texts(self, what: str, mine: str) -> list[str]:
        return [mine]

    def broadcast(self, tree: Any, what: str, rank: int) -> Any:
        self.tree = tree
        return tree if self.given is None else self.given

    def together(self, what: str, do: Any) -> Any:
        return do()


def test_the_state_of_an_accelerator_travels_through_host_memory() -> None:
    """Meta tensors stand for those of an accelerator; counters of steps are on the CPU, too."""
    model = nn.Linear(3, 2, device="meta")
    optimizer = optim.Adam(model.parameters())
    optimizer.state[model.weight] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.zeros(2, 3, device="meta"),
    }
    here: Any = Giving()

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else torch.ones(tensor.shape)

    with mock.patch.object(torch.Tensor, "cpu", cpu):
        SharedState(here, model, optimizer).broadcast()
        (items, beside), (empty, _) = here.tree["optimizer"]
        assert not empty
        assert beside == ["exp_avg"]
        assert {t.device.type for t in (*here.tree["model"].values(), *items.values())} == {"cpu"}
        other = nn.Linear(3, 2, device="meta")
        new = optim.Adam(other.parameters())
        SharedState(Giving(here.tree), other, new).broadcast()  # type: ignore[arg-type]
    state = new.state[other.weight]
    assert {name: item.device.type for name, item in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
    }
    assert state["step"] == 2
