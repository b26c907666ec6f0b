"""Training on several processes: on all ranks bit for bit what one process makes of the same shares."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

from tests.runtime.ranks import training_jobs as jobs
from tests.serial import assert_equal, some, train

pytestmark = pytest.mark.xdist_group("ranks")


def serial(rows: list[list[int]], **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """Train on the shares of all ranks, one after another."""
    model = jobs.normed()
    optimizer = optim.Adam(model.parameters(), 0.01)
    losses = []
    for number, counts in enumerate(rows):
        parts = [jobs.batch(number, rank, n) for rank, n in enumerate(counts)]
        whole = [torch.cat(items) for items in zip(*parts, strict=True)]
        shares = [[n] if n else [] for n in counts]
        losses.append(train(model, functional.cross_entropy, optimizer, whole, shares, **options))
    return losses, dict(model.state_dict()), optimizer.state_dict()["state"]


def assert_all_equal(found: list[Any], expected: Any) -> None:
    for rank, (losses, model, state) in enumerate(found):
        for number, pair in enumerate(zip(losses, expected[0], strict=True)):
            assert_equal(*pair, f"rank {rank}: loss {number}")
        assert_equal(model, expected[1], f"rank {rank}: model")
        assert_equal(state, expected[2], f"rank {rank}: optimizer")


@pytest.mark.parametrize("size", some([2, 3, 4], 3))
def test_ranks_equal_serial_training(ranks, size):
    """With the first step of Adam, ragged batches, and a rank without rows."""
    rows = [[4] * size, [4] * size, [3, *[5] * (size - 1)], [*[4] * (size - 1), 0]]
    found = ranks.run(jobs.train, size, rows, {"reduction": "exchange"})
    assert_all_equal(found, serial(rows))


def test_clipped_gradients_equal_serial_training(ranks):
    rows = [[4, 4], [4, 4]]
    found = ranks.run(jobs.train, 2, rows, {"reduction": "sum", "clip_grad_norm": 0.05})

    def clip(model: nn.Module) -> object:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    assert_all_equal(found, serial(rows, before_step=clip))
