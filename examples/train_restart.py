"""Train on several processes, and go on from the last checkpoint when one of them fails.

Run it with ``torchrun --nproc-per-node=2 --max-restarts=3 examples/train_restart.py --kill-at 17``:
then the last process is killed in its 17th step, torchrun starts all of them again, and training
goes on from step 10. The parameters are those of one process that nothing happened to, bit for bit.
Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import autosched as asc

STEPS, EVERY = 30, 10


def last_checkpoint(folder: Path) -> int:
    """Return the steps of the last complete checkpoint, or 0; what is written last is ".metadata"."""
    return max((int(found.parent.name) for found in folder.glob("*/.metadata")), default=0)


def batch(number: int, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the rows of some ranks."""
    rows = [torch.Generator().manual_seed(1000 * number + rank) for rank in ranks]
    x = torch.cat([torch.rand(64, 8, generator=generator) for generator in rows])
    return x, x.square().sum(1, keepdim=True)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(machine: asc.Machine, folder: Path, kill_at: int | None) -> tuple[nn.Module, Tensor]:
    """Train on this rank's rows, from the last checkpoint on; return the model and the last loss."""
    model, optimizer = new_model()
    loss = torch.tensor(torch.nan)
    with asc.parallel.data_parallel(model, nn.MSELoss(), optimizer, machine) as step:
        done = last_checkpoint(folder)
        if done:
            step.load(folder / str(done))
        for number in range(done + 1, STEPS + 1):
            if number == kill_at and machine.rank == len(machine.names) - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = step(*batch(number, [machine.rank or 0]))
            if number % EVERY == 0:
                step.save(folder / str(number))
    return model, loss


def train_alone(ranks: int) -> nn.Module:
    """Return the model that one process trains, which has the rows of all ranks."""
    model, optimizer = new_model()
    machine = asc.Machine.emulated(gpus=0, hosts=ranks)
    with asc.parallel.data_parallel(
        model, nn.MSELoss(), optimizer, machine, backend="host"
    ) as step:
        for number in range(1, STEPS + 1):
            step(*batch(number, range(ranks)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("checkpoints"), help="which all ranks share"
    )
    parser.add_argument("--kill-at", type=int, help="a step of the first attempt")
    chosen = parser.parse_args()
    torch.set_num_threads(1)

    machine = asc.Machine.cluster()  # joins the processes that torchrun started
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    model, loss = train(machine, chosen.folder, chosen.kill_at if is_first else None)

    alone = train_alone(len(machine.names)).state_dict()
    holds = all(torch.equal(item, alone[name]) for name, item in model.state_dict().items())
    if machine.rank == 0:
        print(f"{STEPS} steps: the loss is {loss:.4f}")
        print(
            f"    parameters equal those of one process, bit for bit: {'holds' if holds else 'BROKEN'}"
        )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
