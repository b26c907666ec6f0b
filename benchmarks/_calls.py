"""What calls of many inputs cost, the guard of a compiled function, and state on devices.

Parameters are inputs. In each call all are the same but one. Simulated GPUs take long themselves: what many inputs
cost there is the difference to the call of two.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as after a capture: its guards compare inputs
from _report import table
from torch import Tensor, nn

import autosched as asc

INPUTS = (2, 567, 1321)  # few; as Inception-v3 has; as a NASNet has
LAYERS = 12  # of the MLP: 24 modules
GUARD = 60  # us, at most
REPLAY = 250  # us, at most, for 567 inputs
SLOWER = 400  # times, so that a CPU can keep up with an emulated GPU
STATE = {
    "stays on the device": None,
    "is copied in each call": {"*.weight": "cpu", "*.bias": "cpu"},
}


def tables(rounds: int) -> list[str]:
    """Return the tables and their targets."""
    sys.path.append(str(Path(__file__).parent.parent))
    from autosched.simulated_gpus import playing

    with ExitStack() as stack:
        ordinary = _measured(
            {
                f"{count} inputs{', one of them written' if writes else ''}": _call(
                    stack, count, writes, "cpu"
                )
                for count in INPUTS
                for writes in (False, True)
            },
            rounds,
        )
    with playing(seed=1) as played, ExitStack() as stack:
        played.eagerness = 0.0
        calls = {f"{n} inputs, replayed": _call(stack, n, False, "cuda:0") for n in INPUTS}
        replayed = _measured(calls, rounds)
    return [
        f"## Calls on the CPU\n\n{ordinary}",
        f"## Replayed calls on a simulated GPU\n\n{replayed}",
        f"Target: {REPLAY} us for 567 inputs, beyond the call of 2.",
        f"## An MLP of {2 * LAYERS} modules\n\n{_compiled(rounds)}",
        f"Target: the guard takes at most {GUARD} us.",
        f"## An MLP on an emulated GPU\n\n{_resident(rounds)}",
        f"The emulated GPU is slowed {SLOWER} times; predictions are for that of full speed.",
    ]


def _call(stack: ExitStack, count: int, writes: bool, device: str) -> Callable[[], Any]:
    """Return a call with as many inputs, of which one is another tensor than in the last call."""
    graph = asc.Graph()
    names = [f"layer{number}.weight" for number in range(count - 1)]
    *weights, x = graph.inputs(*names, "x")
    if writes:
        graph.add(_add_, *weights, x, writes=weights[:1])
    graph.output(y=graph.add(_sum, *weights, x))
    machine = asc.Machine.local(gpus=int(device != "cpu"))
    how: dict[str, Any] = {"inputs": device, "replay": True} if device != "cpu" else {}
    schedule = stack.enter_context(asc.schedule(graph, machine, policy="single", **how))
    inputs = {name: torch.rand(16).to(device) for name in names}
    images = cycle([torch.rand(16).to(device) for _ in range(2)])
    return lambda: schedule(**inputs, x=next(images))


def _sum(*given: Tensor) -> Tensor:
    return given[0] + given[-1]


def _add_(*given: Tensor) -> None:
    given[0].add_(given[-1])


def _compiled(rounds: int) -> str:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    x = torch.rand(4, 16)
    with asc.compile(model, asc.Machine.local(gpus=0), policy="single") as run:
        calls: dict[str, Callable[[], Any]] = {
            "eager": lambda: model(x),
            "autosched.compile": lambda: run(x),
            "its guard": lambda: run.schedule(x),
        }
        return _measured(calls, 10 * rounds)


def _resident(rounds: int) -> str:
    """Return the table of inference where weights stay on the device, and where they do not."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers)
    x = torch.rand(128, 1024)
    machine = asc.Machine.emulated(gpus=1).slower(SLOWER)
    with ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {}
        for what, inputs in STATE.items():
            run = asc.compile(model, machine, place={"*": "cuda:0"}, inputs=inputs)
            stack.enter_context(run)
            predicted = run.schedule(x).makespan / SLOWER * 1e6
            calls[f"state {what}; {predicted:.0f} us predicted"] = partial(run, x)
        return _measured(calls, max(5, rounds // 100))


def _measured(calls: Mapping[str, Callable[[], Any]], rounds: int) -> str:
    """Return the table of calls that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in [*calls.values()] * 5:
        call()
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    rows = [
        [name, f"{statistics.median(found) * 1e6:.0f}", f"{min(found) * 1e6:.0f}"]
        for name, found in seconds.items()
    ]
    return table(["", "median us", "least us"], rows)
