"""The time of a captured training step, and of capturing and scheduling it.

The step is forward, backward and SGD with momentum, of an MLP on one CPU, compared with eager
execution and other captures, which take turns. Then a ResNet-50 is captured, and scheduled for one
CPU and two GPUs.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable

import torch
from _report import options, publish, table
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.optim.sgd import sgd

import autosched as asc

Step = Callable[[Tensor, Tensor], Tensor]


def stepper(model: nn.Module, compiled: str | None = None) -> Step:
    """Return a training step of a model, of which ``torch.compile`` may have compiled the forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward = torch.compile(model, backend=compiled) if compiled else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_fx(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return the same step as ``make_fx`` traces it, to be run by the code of its GraphModule."""
    names, weights = zip(*model.named_parameters(), strict=True)
    moments = [torch.zeros_like(weight) for weight in weights]

    def step(weights: list[Tensor], moments: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        called = functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        loss = functional.cross_entropy(called, y)
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            sgd(
                weights, list(grads), moments, foreach=False, weight_decay=0.0, momentum=0.9,
                lr=0.01, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
        return loss

    given = [*weights], moments, x, y
    with torch.autograd.set_multithreading_enabled(False):
        module = make_fx(step, tracing_mode="fake")(*given)
    return lambda: torch.no_grad()(module)(*given)


def mlp(width: int) -> nn.Module:
    layers = [
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut: He et al., CVPR 2016."""

    def __init__(self, inside: int, width: int, stride: int):
        super().__init__()
        norm, outside = nn.BatchNorm2d, 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False), norm(outside),
        )  # fmt: skip
        past = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))
        self.past = past if stride != 1 or inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        return functional.relu(self.body(x) + self.past(x))


def resnet50() -> nn.Module:
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            layers.append(Bottleneck(inside, 64 << stage, 2 if stage and not number else 1))
            inside = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def replay(width: int, batch: int, rounds: int) -> list[str]:
    """Return a row: the seconds of an eager step, and of the others as multiples of it."""
    eager = mlp(width)
    captured = stepper(copy.deepcopy(eager))
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    with asc.compile(captured, asc.Machine([asc.Device("cpu")]), backend="host") as ours:
        steps = [stepper(eager), stepper(copy.deepcopy(eager), "eager"), ours]
        contenders: list[Callable[[], object]] = [functools.partial(step, x, y) for step in steps]
        contenders.insert(2, by_fx(copy.deepcopy(eager), x, y))
        for _ in range(5):
            for run in contenders:
                run()
        inputs = asc.capture(captured, x, y).examples
        schedule = ours.schedule(x, y)
        schedule(**inputs)
        contenders.append(lambda: schedule(**inputs))
        found = [[_seconds(run) for run in contenders] for _ in range(rounds)]
    first, *others = [statistics.median(column) for column in zip(*found, strict=True)]
    return [
        f"{width} wide, batch {batch}",
        f"{first * 1e6:.0f}",
        *(f"{other / first:.2f}" for other in others),
    ]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    chosen = options(__doc__)
    torch.set_num_threads(1)
    head = [
        "",
        "eager (us)",
        'torch.compile, "eager"',
        "torch.fx",
        "asc.compile",
        "its schedule alone",
    ]
    rounds = 20 if chosen.quick else 300
    rows = [replay(width, batch, rounds) for width, batch in ((16, 8), (128, 32), (512, 64))]
    model = resnet50()
    step, batch = stepper(model), (torch.randn(2, 3, 64, 64), torch.randint(0, 1000, (2,)))
    start = time.perf_counter()
    graph = asc.capture(step, *batch)
    middle = time.perf_counter()
    asc.schedule(graph, asc.Machine.emulated(gpus=2), examples=graph.examples)
    end = time.perf_counter()
    large = (
        f"ResNet-50: captured in {middle - start:.1f} s, {len(graph)} tasks; scheduled in "
        f"{end - middle:.1f} s. Targets: 20 s and 5 s."
    )
    parts = [
        f"## An MLP's step, as multiples of the eager one, median of {rounds}\n\n{table(head, rows)}\n\n"
        "Target for `asc.compile`: at most 1.05, and below 1 where Python dominates. The time beyond "
        "that of its schedule alone is the guard, which at each call inspects modules, optimizers and "
        "all else that the step refers to. `torch.compile` has the forward alone; `torch.fx` the "
        "whole step, as operators, without guards.",
        large,
    ]
    publish("capture", "Capture", parts, chosen)


if __name__ == "__main__":
    main()
