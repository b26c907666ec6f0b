"""PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ResNet-50 on two GPUs, cut in two and pipelined.

https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html (until 2024)

There the network is cut behind ``layer2``; one GPU waits while the other computes, which costs 7%; then the batch of
120 goes through in splits of 20, found by trying, which gains 54% over one GPU; and it ends where copies and products
would need streams of their own. Here ``asc.parallel`` does all of it: the tutorial's two steps, then its own cut,
order and number of splits, with the curve that chose them. The network is as deep as the tutorial's and 16 times
narrower, for a CPU's sake. Exit code 1 if autosched's pipeline is not predicted to gain more than 54%, or if it trains
something else than the one GPU.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import book
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.viz import Line, bars_svg, lines_svg

WIDTH = 4  # channels of the first block: 64 in the tutorial
PIXELS = 16  # 128 in the tutorial, of which 32 are left when the first block sees them
BATCH, CLASSES = 120, 10
LOSS = functional.mse_loss
SPLIT = 20  # images: what the tutorial found best
PARTS = BATCH // SPLIT
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # images: what it tried
PROMISED = 1.54  # times faster than one GPU: what it reached
LINKS, LATENCY = 1000, 10  # how many times slower than real ones: see machine_with


class Bottleneck(nn.Module):
    """Three convolutions, narrow in the middle, and a shortcut around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, 4 * width, height / stride, width / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """The layers of ResNet-50 by the names that they have in the tutorial, for small images."""

    def __init__(self, width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = layer(width, width, blocks=3, stride=1)
        self.layer2 = layer(4 * width, 2 * width, blocks=4, stride=2)
        self.layer3 = layer(8 * width, 4 * width, blocks=6, stride=2)
        self.layer4 = layer(16 * width, 8 * width, blocks=3, stride=2)
        self.fc = nn.Linear(32 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def layer(before: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(before, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ResNet50()
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def batch() -> book.Batch:
    """Return random images, each with a random class as a row of 0 and 1: what the tutorial trains on."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    return torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator), functional.one_hot(classes, CLASSES).float()


class Result(NamedTuple):
    """Seconds of a step, and the network after all steps that were measured."""

    measured: book.Seconds
    predicted: float
    model: nn.Module


def result(way: Callable[..., Any], machine: asc.Machine, runs: int, **how: Any) -> Result:
    model, optimizer = make()
    with way(model, loss_fn=LOSS, optimizer=optimizer, machine=machine, **how) as step:
        if not how:
            print(f"{step.cuts(*batch())}\n{step.curve(*batch())}\n", flush=True)
        return Result(book.measure(step, batch(), runs), step.schedule(*batch()).makespan, model)


def serial(machine: asc.Machine, steps: int, parts: int) -> nn.Module:
    """Return the network after steps in plain PyTorch, on one part of the batch after the other."""
    (model, optimizer), device = make(), book.where(machine)
    model.to(device)
    x, y = (tensor.to(device) for tensor in batch())
    for _ in range(steps):
        book.serial_step(model, LOSS, optimizer, (x, y), parts)
    return model


def compare_ways(machine: asc.Machine, options: argparse.Namespace) -> bool:
    """Four ways to train ResNet-50 on a batch of 120 images."""
    first, second = machine.accelerators
    cut = dict.fromkeys(["conv1", "bn1", "layer1", "layer2"], first) | dict.fromkeys(["layer3", "layer4", "fc"], second)
    cut_in_two, pipeline = asc.parallel.model_parallel, asc.parallel.pipeline
    results = {
        "one GPU": result(cut_in_two, machine, options.runs, devices=[first]),
        "cut in two": result(cut_in_two, machine, options.runs, split=cut),
        "pipelined by hand": result(pipeline, machine, options.runs, split=cut, chunks=PARTS, schedule="gpipe"),
        "autosched": result(pipeline, machine, options.runs),
    }
    one = results["one GPU"]
    rows = (
        (
            name,
            r.measured,
            f"{r.predicted:.3f}",
            f"{one.measured.mean / r.measured.mean:.2f}",
            f"{gain(results, name):.2f}",
        )
        for name, r in results.items()
    )
    print(book.table(("", "sec/batch", "predicted", "speed-up", "predicted"), *rows))
    bars = [bar for name, r in results.items() for bar in book.bars_of(name, r.measured, r.predicted)]
    book.draw(options.folder, "resnet50_ways", bars_svg(bars, title=compare_ways.__doc__, unit="s"))
    return promises(results, serial(machine, options.runs + 1, PARTS))


def gain(results: Mapping[str, Result], name: str) -> float:
    """Return how many times faster than one GPU a way is predicted to be."""
    return results["one GPU"].predicted / results[name].predicted


def promises(results: Mapping[str, Result], plain: nn.Module) -> bool:
    """Print what must hold, and return whether all of it does; ``plain`` trained on one split after the other."""
    models = {name: found.model for name, found in results.items()}
    pairs = zip(models["pipelined by hand"].parameters(), plain.parameters(), strict=True)
    near = all(torch.allclose(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5) for ours, theirs in pairs)
    return all(
        [
            book.verdict(f"autosched is predicted to gain {PROMISED - 1:.0%}", gain(results, "autosched") > PROMISED),
            book.verdict(
                "cut in two trains as one GPU, bit for bit", not book.different(models["cut in two"], models["one GPU"])
            ),
            book.verdict("pipelined trains as split after split, but for rounding", near),
        ]
    )


def compare_splits(machine: asc.Machine, options: argparse.Namespace) -> None:
    """Seconds for a batch of 120 images, by images in a split."""
    results = {
        size: result(asc.parallel.pipeline, machine, options.runs, chunks=BATCH // size) for size in options.splits
    }
    rows = ((size, found.measured, f"{found.predicted:.3f}") for size, found in results.items())
    print(book.table(("images in a split", "sec/batch", "predicted"), *rows))
    lines = [
        Line("predicted", [(size, found.predicted) for size, found in results.items()], "dashed"),
        Line(
            "measured", [(size, found.measured.mean, *found.measured.ends) for size, found in results.items()], "points"
        ),
    ]
    svg = lines_svg(lines, title=compare_splits.__doc__, x="images in a split", y="time", y_unit="s", log_x=True)
    book.draw(options.folder, "resnet50_splits", svg)


def main() -> int:
    options = book.parser("ResNet-50, its layers on two GPUs.").parse_args()
    options.runs, options.splits = (1, (SPLIT, 60)) if options.quick else (4, SPLITS)
    machine, kind = book.machine_with(2, links=LINKS, latency=LATENCY)
    print(f"machine: {kind}\n{machine}\n", flush=True)
    held = compare_ways(machine, options)
    print()
    compare_splits(machine, options)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
