"""What ranks give to each other of their state: in host memory, and back where it was."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn, optim

from autosched.parallel.ranks import SharedState


class Rank:
    """One of two ranks; ``said`` is what rank 0 told, if this is the other one."""

    def __init__(self, said: Any = None):
        self.rank = 0 if said is None else 1
        self.said: list[Any] = [] if said is None else [*said]
        self.rows: list[torch.Tensor] = []

    def compare(self, *_: Any) -> None:
        """Find no difference."""

    def gather(self, what: str, make: Any) -> list[Any]:
        mine = make()
        if self.rank:
            return [self.said.pop(0), mine]
        self.said.append(mine)
        return [mine, []]

    def broadcast(self, row: torch.Tensor, root: int, what: str) -> None:
        self.rows.append(row)


def test_the_state_of_an_accelerator_travels_through_host_memory() -> None:
    """Meta tensors stand for those of an accelerator; counters of steps are on the CPU, too."""
    model = nn.Linear(3, 2, device="meta")
    optimizer = optim.Adam(model.parameters())
    optimizer.state[model.weight] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.zeros(2, 3, device="meta"),
    }
    here: Any = Rank()

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else torch.ones(tensor.shape)

    with mock.patch.object(torch.Tensor, "cpu", cpu):
        SharedState(here, model, optimizer).broadcast()
    assert [[*row.shape] for row in here.rows] == [[6], [2], [1], [6]]
    other = nn.Linear(3, 2, device="meta")
    new = optim.Adam(other.parameters())
    there: Any = Rank(here.said)
    SharedState(there, other, new).broadcast()
    assert {row.device.type for row in (*here.rows, *there.rows)} == {"cpu"}
    kinds = {name: item.device.type for name, item in new.state[other.weight].items()}
    assert kinds == {"step": "cpu", "exp_avg": "meta"}
    assert other.bias not in new.state
