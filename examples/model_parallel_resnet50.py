"""PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ResNet-50 on two GPUs, cut in two and pipelined.

https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html

There the network is cut after ``layer2``; one GPU waits while the other computes, which costs 7%.
Then the batch is pipelined in splits of 20 images, a size found by trial, which gains 54% over one
GPU; the tutorial ends where copies would need separate streams. Here ``asc.parallel`` does all of
it: the tutorial's two steps, then stages, a pipeline schedule and a split size that it chooses by
simulation, and the curve of that choice. The network is as deep as the tutorial's and 16 times
narrower, to run on a CPU, so its early layers, with many bytes to copy for little work, have a
larger share. Exit code 1 if autosched's pipeline is not predicted to gain more than 54%, or if
training on two GPUs differs from that on one.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import book
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.viz import gantt_svg

WIDTH = 4  # channels of the first block: 64 in the tutorial
PIXELS = 16  # 128 in the tutorial, of which 32 are left when the first block sees them
BATCH, CLASSES = 120, 10
LOSS = functional.mse_loss
SPLIT = 20  # images: the tutorial's best
PARTS = BATCH // SPLIT
SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # images: those that it tried
MEASURED = (8, 20, 60)  # of these, to save time; all are predicted
PROMISED = 1.54  # times faster than one GPU: its result
SLOW, LATENCY = 2000, 1  # see machine_with
# How much slower links are, so that two stages cost the same 7%; blocks of each layer; measured
# steps; arguments that autosched does not choose; and split sizes.
FULL = 850, (3, 4, 6, 3), 4, {}, SPLITS
QUICK = 300, (1, 1, 1, 1), 1, {"schedule": "gpipe", "chunks": 12}, (SPLIT,)


class Bottleneck(nn.Module):
    """Three convolutions, narrow in the middle, and a shortcut around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, 4 * width, height / stride, width / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The layers of ResNet-50, by the names that they have in the tutorial, for small images."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.layer1 = layer(WIDTH, WIDTH, blocks[0], stride=1)
        self.layer2 = layer(4 * WIDTH, 2 * WIDTH, blocks[1], stride=2)
        self.layer3 = layer(8 * WIDTH, 4 * WIDTH, blocks[2], stride=2)
        self.layer4 = layer(16 * WIDTH, 8 * WIDTH, blocks[3], stride=2)
        self.fc = nn.Linear(32 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def layer(before: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(before, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


def batch() -> book.Batch:
    """Return random images, each with a random class as a row of 0 and 1: what the tutorial trains on."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    return torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator), functional.one_hot(
        classes, CLASSES
    ).float()


class Result(NamedTuple):
    """Seconds of a step, the order of the tasks on devices, and the network after all steps."""

    measured: book.Seconds
    predicted: float
    order: str
    model: nn.Module


@dataclass(frozen=True)
class Experiment:
    """The machine, the network, the number of runs, and the folder for pictures."""

    machine: asc.Machine
    blocks: Sequence[int]
    runs: int
    chosen: Mapping[str, Any]  # arguments that autosched does not choose
    folder: Path | None

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the network, the same each time, and its optimizer."""
        torch.manual_seed(0)
        model = ResNet(self.blocks)
        return model, torch.optim.SGD(model.parameters(), lr=0.001)

    def step(self, way: Callable[..., Any], **how: Any) -> Any:
        """Return a training step of a new network."""
        model, optimizer = self.make()
        return way(model, loss_fn=LOSS, optimizer=optimizer, machine=self.machine, **how)

    def result(self, step: Any) -> Result:
        """Train."""
        with step:
            measured = book.measure(step, batch(), self.runs)
            return Result(
                measured,
                step.schedule(*batch()).makespan,
                step.notes(*batch())["order"],
                step.model,
            )

    def serial(self, parts: int) -> nn.Module:
        """Return the network after as many serial steps in eager PyTorch."""
        (model, optimizer), device = self.make(), book.where(self.machine)
        model.to(device)
        x, y = (tensor.to(device) for tensor in batch())
        for _ in range(1 + self.runs):
            book.serial_step(model, LOSS, optimizer, (x, y), parts)
        return model


def compare_ways(experiment: Experiment) -> dict[str, Result]:
    """Train as the tutorial does, and as autosched does."""
    first, second = experiment.machine.accelerators
    cut = dict.fromkeys(["conv1", "bn1", "layer1", "layer2"], first) | dict.fromkeys(
        ["layer3", "layer4", "fc"], second
    )
    model_parallel, pipeline = asc.parallel.model_parallel, asc.parallel.pipeline
    steps = {
        "one GPU": experiment.step(model_parallel, devices=[first]),
        "cut in two": experiment.step(model_parallel, split=cut),
        "pipelined by hand": experiment.step(pipeline, split=cut, chunks=PARTS, schedule="gpipe"),
        "autosched": experiment.step(pipeline, **experiment.chosen),
    }
    explain(steps["autosched"], experiment.folder)
    results = {name: experiment.result(step) for name, step in steps.items()}
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
    times = {name: (r.measured, r.predicted) for name, r in results.items()}
    title = "ResNet-50: training on a batch of 120 images"
    book.draw_times(experiment.folder, "resnet50_ways", title, times)
    return results


def explain(step: Any, folder: Path | None) -> None:
    """Print and draw the choice of autosched, and its alternatives."""
    notes, timeline = step.notes(*batch()), step.schedule(*batch()).simulate()
    best: dict[str, Any] = {}
    for one in sorted(notes["curve"].tried, key=lambda tried: tried.seconds):
        best.setdefault(one.order, one)
    rows = (
        (one.order, BATCH // one.chunks, f"{one.seconds:.3f}", f"{one.idle:.1%}")
        for one in best.values()
    )
    print(
        f"{step.cuts(*batch())}\n\n{book.table(('order', 'images in a split', 'predicted', 'idle'), *rows)}\n"
    )
    book.draw(
        folder,
        "resnet50_step",
        gantt_svg(timeline, title="A training step of ResNet-50 on two GPUs"),
    )


def compare_splits(experiment: Experiment, order: str, sizes: Sequence[int]) -> None:
    """Print and draw the times of a batch by split size, measured for some of them."""
    how = {"way": asc.parallel.pipeline, "schedule": order}
    with experiment.step(**how) as step:
        curve = step.curve(*batch(), chunks=[BATCH // size for size in sizes])
    predicted = {BATCH // chunks: seconds for chunks, seconds in curve.seconds(order).items()}
    found = {
        size: experiment.result(experiment.step(**how, chunks=BATCH // size)).measured
        for size in sizes
        if size in MEASURED
    }
    rows = ((size, found.get(size, ""), f"{predicted[size]:.3f}") for size in sizes)
    print(book.table(("images in a split", "sec/batch", "predicted"), *rows))
    if experiment.folder:
        figure = Figure(layout="constrained", figsize=(7.5, 3.6))
        title = "ResNet-50: training on a batch of 120 images, in splits"
        axes = figure.add_subplot(title=title, xlabel="images in a split", ylabel="seconds")
        axes.semilogx(list(predicted), list(predicted.values()), "--", label="predicted")
        means = [seconds.mean for seconds in found.values()]
        deviations = [seconds.deviation for seconds in found.values()]
        axes.errorbar(list(found), means, yerr=deviations, fmt="o", label="measured")
        axes.legend()
        figure.savefig(experiment.folder / "resnet50_splits.svg")


def gain(results: Mapping[str, Result], name: str) -> float:
    """Return the predicted speed relative to one GPU."""
    return results["one GPU"].predicted / results[name].predicted


def promises(results: Mapping[str, Result], plain: nn.Module) -> bool:
    """Print the conditions, and return whether all hold; ``plain`` was trained serially."""
    hand, two, one = (
        results[name].model for name in ("pipelined by hand", "cut in two", "one GPU")
    )
    pairs = zip(hand.parameters(), plain.parameters(), strict=True)
    near = all(
        torch.allclose(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5) for ours, theirs in pairs
    )
    return all(
        [
            book.verdict(
                f"autosched is predicted to gain {PROMISED - 1:.0%}",
                gain(results, "autosched") > PROMISED,
            ),
            book.verdict("cut in two trains as one GPU, bit for bit", not book.different(two, one)),
            book.verdict("pipelined trains as split after split, but for rounding", near),
        ]
    )


def main() -> int:
    options = book.parser("ResNet-50, its layers on two GPUs.").parse_args()
    links, blocks, runs, chosen, sizes = QUICK if options.quick else FULL
    machine, kind = book.machine_with(2, SLOW, links, LATENCY)
    print(f"machine: {kind}\n{machine}\n", flush=True)
    experiment = Experiment(machine, blocks, runs, chosen, options.folder)
    results = compare_ways(experiment)
    held = promises(results, experiment.serial(PARTS))
    compare_splits(experiment, results["autosched"].order, sizes)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
