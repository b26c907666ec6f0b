"""Predict ResNet-50 on two GPUs: the stages and pipeline of PyTorch's tutorial, and autosched's.

PyTorch's tutorial "Single-Machine Model Parallel Best Practices" trains ResNet-50 on batches of 120
images of 128 x 128 pixels. Cut after ``layer2``, it takes 7% longer than on one GPU; in splits of
20 it is 54% faster, which is the tutorial's last result. The machine model here has the same 7%:
GPUs of 2 TFLOP/s and 200 GB/s, and a link whose rate follows from the 7%. The network is captured
at its true size, on tensors without data; nothing is computed.

The bound is one for any order of the same tasks: the work of the busiest device, plus the shortest
chains of tasks that must precede and follow it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _report import options, publish, table
from torch import nn
from torch.nn import functional

import autosched as asc

BATCH, SPLIT, PIXELS = 120, 20, 128
SLOWER, FASTER = 1.07, 1.54  # the tutorial's, against one GPU
HALF = dict.fromkeys(["conv1", "bn1", "layer1", "layer2"], "cuda:0") | dict.fromkeys(
    ["layer3", "layer4", "fc"], "cuda:1"
)
QUICK = [6, 8]


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, before: int, inner: int, stride: int):
        super().__init__()
        after = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = (
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
        )
        self.conv3, self.bn3 = nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)
        past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.past = past if stride > 1 or before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of four times as many channels as the inner ones."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.past(x))


class ResNet50(nn.Module):
    """He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        before = 64
        for number, (count, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            blocks = []
            for i in range(count):
                blocks.append(Bottleneck(before, inner, 2 if number > 1 and not i else 1))
                before = 4 * inner
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(before, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of 1,000 classes."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3)))


def machine(bytes_per_second: float) -> asc.Machine:
    """Return two GPUs and a host, with one rate for all links."""
    gpu = asc.Device("cuda:0", flops_per_second=2e12, bytes_per_second=2e11)
    names = ("cpu", "cuda:0", "cuda:1")
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    devices = [asc.Device("cpu", 1, 50e9, 10e9), gpu, replace(gpu, name="cuda:1")]
    return asc.Machine(
        devices, [asc.Link(a, b, bytes_per_second, 1e-5) for a, b in pairs], imagined=True
    )


def bound(schedule: asc.Schedule) -> float:
    """Return a lower bound on the seconds of all orders of a schedule's tasks."""
    graph, costs, on = schedule.graph, schedule.costs, schedule.placement.device
    seconds = [costs.task_seconds(t, schedule.machine.device(on[t.name])) for t in graph.tasks]
    head, tail = [0.0] * len(seconds), [0.0] * len(seconds)
    for task in graph.tasks:
        head[task.index] = max(
            (head[d.task] + seconds[d.task] for d in task.dependencies), default=0.0
        )
    for task in reversed(graph.tasks):
        tail[task.index] = max((tail[u] + seconds[u] for u in graph.users[task.index]), default=0.0)
    found = 0.0
    for device in schedule.machine.accelerators:
        own = [
            task.index for task in graph.tasks if on[task.name] == device and seconds[task.index]
        ]
        if own:
            busy = sum(seconds[i] for i in own)
            found = max(found, min(head[i] for i in own) + busy + min(tail[i] for i in own))
    return found


def main() -> None:
    chosen = options(__doc__)
    model = ResNet50()
    training: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), 0.001),
    }
    x, y = torch.empty(BATCH, 3, PIXELS, PIXELS), torch.empty(BATCH, 1000)

    def planned(way: Any, **how: Any) -> Any:
        return way(model, **training, **how)

    model_parallel, pipeline = (
        partial(planned, way) for way in (asc.parallel.model_parallel, asc.parallel.pipeline)
    )
    fast = machine(1e12)
    one = model_parallel(machine=fast, devices=["cuda:0"]).schedule(x, y).makespan
    two = model_parallel(machine=fast, split=HALF)
    sent = 2 * two.cuts(x, y).nbytes[0]  # forward and backward
    rate = sent / (SLOWER * one - two.schedule(x, y).makespan + sent / 1e12)
    tutorial = machine(rate)
    cut = model_parallel(machine=tutorial, split=HALF).schedule(x, y)
    hand = pipeline(machine=tutorial, split=HALF, chunks=BATCH // SPLIT, schedule="gpipe").schedule(
        x, y
    )
    step = pipeline(machine=tutorial, schedule="zb-v" if chosen.quick else "auto")
    curve = step.curve(x, y, chunks=QUICK if chosen.quick else None)
    best = pipeline(machine=tutorial, chunks=curve.best.chunks, schedule=curve.best.order).schedule(
        x, y
    )
    rows = [
        (
            name,
            f"{s * 1e3:.0f}",
            f"{one / s - 1:+.0%}",
            "" if plan is None else f"{bound(plan) / s:.1%}",
        )
        for name, s, plan in (
            ("one GPU", one, None),
            ("cut in two", cut.makespan, None),
            (f"GPipe, splits of {SPLIT}, the tutorial's cut", hand.makespan, hand),
            (
                f"{curve.best.order}, {curve.best.chunks} micro-batches, autosched's cut",
                best.makespan,
                best,
            ),
        )
    ]
    publish(
        "pipeline",
        "ResNet-50 on two GPUs, predicted",
        [
            f"Links of {rate / 1e9:.2f} GB/s, so that the network cut in two takes {SLOWER - 1:.0%} longer than on one "
            f"GPU, as in PyTorch's tutorial, which gained {FASTER - 1:.0%} by a pipeline. A batch of {BATCH} images.",
            table(("way", "ms", "gain", "bound / time"), rows),
            f"```text\n{curve}\n```",
        ],
        chosen,
    )


if __name__ == "__main__":
    main()
