"""A program for sanitizers to watch in a process of its own: two logical devices on one GPU, all issued by one thread.

``python -m tests.gpu.sanitized`` runs it; with a number, that wait is left out.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import autosched as asc
from autosched.program.program import Wait
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.execute import Executor

N = 1 << 20


def plan() -> asc.Schedule:
    """Copies both ways, two streams on one device, a write in place, and memory that goes back while others run."""
    kind = str(torch.accelerator.current_accelerator())
    names = f"{kind}:0", f"{kind}:1"
    devices = [asc.Device(name, streams=2, physical=names[0]) for name in names]
    machine = asc.Machine(devices, [asc.Link(*names, 1e10)])
    graph = asc.Graph("sanitized")
    x, w = graph.inputs("x", "w")
    with graph.on(names[0]):
        a, b = x + 1, x * 2
        w.mul_(0.5)
    with graph.on(names[1]):
        c = torch.relu(a) + b
        d = torch.tanh(b)
    with graph.on(names[0]):
        graph.output(y=c * w + d)
    costs = asc.Costs(default_seconds=1e-4, default_nbytes=4 * N)
    return asc.schedule(graph, machine, policy="heft", costs=costs)


def inputs(run: int = 0) -> dict[str, torch.Tensor]:
    """Return other numbers for each run, so that what an earlier run has left is wrong."""
    where = torch.device(str(torch.accelerator.current_accelerator()), 0)
    return {
        "x": torch.full((N,), 1.0 + run, device=where),
        "w": torch.full((N,), 1.0 + 2 * run, device=where),
    }


def run(left_out: int | None = None, times: int = 3) -> list[float]:
    """Run it so often, without a wait perhaps; return a number of each result."""
    schedule, found = plan(), []
    program = schedule.program
    if left_out is not None:
        at = [i for i, instruction in enumerate(program) if isinstance(instruction, Wait)][left_out]
        program = replace(
            program, instructions=program.instructions[:at] + program.instructions[at + 1 :]
        )
    executor = Executor(
        program, schedule.graph, schedule.machine, Accelerator(), [0.0] * len(program)
    )
    executor.checked = True  # what watches tasks reads tensors that sanitizers know nothing of
    for number in range(times):
        found.append(executor(inputs(number))["y"][-1].item())
    executor.close()
    return found


if __name__ == "__main__":
    print(run(*map(int, sys.argv[1:])))
