"""Training that ranks do in tests: each function runs in a process of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autosched as asc
from autosched.parallel.packing import Reusing


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def batch(number: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a rank."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def train(rows: list[list[int]], options: dict[str, Any], gamma: float = 1.0) -> Any:
    """Train on batches of so many rows of each rank; return losses, model, optimizer.

    The rate is multiplied by ``gamma`` every other step.
    """
    machine = asc.Machine.cluster()
    model = normed()
    if machine.rank:
        with torch.no_grad():
            model[0].weight.zero_()  # rank 0's counts
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma)
    losses = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, **options
    ) as step:
        for number, counts in enumerate(rows):
            losses.append(step(*batch(number, machine.rank, counts[machine.rank])))
            scheduler.step()
    return losses, dict(model.state_dict()), optimizer.state_dict()["state"]


def addresses(count: int, options: dict[str, Any]) -> list[list[int]]:
    """Return where the gradients are reduced in each step after the first, which runs checks."""
    machine = asc.Machine.cluster()
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, **options
    ) as step:
        for rows in (*[4] * (count + 1), 3):
            given = batch(0, machine.rank, rows)
            step(*given)
            tasks = step.schedule(*given).graph.tasks
            kept = [task.fn._last for task in tasks if isinstance(task.fn, Reusing)]
            found.append([tensor.data_ptr() for last in kept for tensor in last])
            if rows == 4:
                first = kept
    assert not any(first), "a plan that is not used keeps no memory"
    return found[1:-1]


def drop(count: int, seeds: list[int]) -> Any:
    """Train a model with dropout, whose numbers each rank draws from its own seed."""
    machine = asc.Machine.cluster()
    model = dropping()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(seeds[machine.rank])
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, reduction="sum"
    ) as step:
        losses = [step(*batch(number, machine.rank, 4)) for number in range(count)]
    return losses, dict(model.state_dict())


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 4))


def with_options(rows: list[list[int]], options: dict[str, Any]) -> Any:
    """Train with a scheduler of the rate."""
    return train(rows, known(options), gamma=0.5)


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with objects for their names."""
    objects = {"half": asc.parallel.Half()}
    return {name: objects.get(str(item), item) for name, item in options.items()}


def sign() -> Path:
    """Return the file that makes a model of this process fail."""
    return Path(tempfile.gettempdir(), f"autosched-{os.getpid()}-fails")


class Failing(nn.Module):
    """Raises in forward while a file exists, which no guard watches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if sign().exists():
            raise ValueError("of a test")
        return x


@torch.library.custom_op("autosched_tests::sometimes", mutates_args=())
def sometimes(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; raise for a row of NaN."""
    if bool(x.isnan().any()):
        raise ValueError("of a test")
    return x.clone()


@sometimes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Sometimes(nn.Module):
    """Raises in a run where its input is not a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sometimes(x.detach()) + x


class Unkeyed:
    """A setting of an optimizer that has no hash, which the key of a step needs."""

    def __init__(self, error: BaseException):
        self.error = error

    def __hash__(self) -> int:
        raise self.error


def differ(what: str, step: Any) -> None:
    """Change what this rank has, for its next step."""
    group = step.optimizer.param_groups[0]
    if what in ("key", "interrupt"):
        group["setting"] = Unkeyed(KeyboardInterrupt() if what == "interrupt" else fault())
    if what == "inputs":
        step._batch_inputs = failing
    if what == "closed":
        step.close()
    if what == "changed":
        with torch.no_grad():
            step.model[2].weight.zero_()


def fault() -> Exception:
    return ValueError("of a test")


def failing(*_: Any) -> Any:
    raise fault()


def undo(step: Any) -> None:
    """Undo what would make further steps fail."""
    step.optimizer.param_groups[0].pop("setting", None)
    step.__dict__.pop("_batch_inputs", None)


def misuse(what: str) -> list[str]:
    """Take a step, another in which ranks differ, and two more; return what each ended with."""
    machine = asc.Machine.cluster()
    rank = machine.rank
    model = nn.Sequential(Failing(), Sometimes(), nn.Linear(8, 4, device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ended = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, reduction="exchange"
    ) as step:
        for number in range(4):
            x, y = items = batch(number, rank, 4)
            differs = number == 1 and rank == 1
            if differs:
                items = {
                    "dtype": (x.double(), y),
                    "shape": (x[:, :4], y),
                    "item": (x,),
                    "rows": (x, y[:3]),
                    "nan": (x * torch.nan, y),
                }.get(what, items)
            if what == "capture":
                items = batch(number, rank, 4 + number)  # to be captured again
                sign().unlink(missing_ok=True)
                if differs:
                    sign().touch()
            if what == "mode":
                model.train(not differs)
            if what == "rate":
                optimizer.param_groups[0]["lr"] = 0.2 if differs else 0.1
            if what == "frozen":
                model[2].bias.requires_grad_(not differs)
            if differs:
                differ(what, step)
            try:
                step(*items)
                ended.append(str([p.tolist() for p in model.parameters()]))
            except (Exception, KeyboardInterrupt) as error:
                ended.append(f"{type(error).__name__}: {error}")
            undo(step)
    return ended
