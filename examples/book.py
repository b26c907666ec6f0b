"""Images, machines, training and printing for the examples from the book, as its module ``d2l``.

All random numbers have seeds, so every run computes the same numbers.
"""

import argparse
import gzip
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.demo import load_digits
from autosched.viz import gantt_svg

SLOW = 1500  # times slower than real GPUs, so that two cores can emulate them
LATENCY = 4  # times longer to start a kernel or a copy, since Python starts the operators
STEPS = 20  # after which parameters are compared
# The book's allreduce, in small buckets for small networks.
SUMS = {"reduction": "sum", "buckets": (2**16, 2**16)}

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
# Returns a network, the same each time, and its optimizer.
Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Step = Callable[[Tensor, Tensor], Tensor]


class Images(NamedTuple):
    """Images of shape (n, channels, height, width), and their classes, for training and for tests."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


class Seconds(NamedTuple):
    """The mean and the standard deviation of the times of runs."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> "Seconds":
        """Sum up measured seconds."""
        return cls(statistics.mean(runs), statistics.stdev(runs) if len(runs) > 1 else 0.0)

    @property
    def ends(self) -> tuple[float, float]:
        """One standard deviation below the mean and one above."""
        return self.mean - self.deviation, self.mean + self.deviation

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


def digits(size: int) -> Images:
    """Return scikit-learn's digits, scaled up from 8x8 to ``size`` x ``size`` pixels."""
    data = load_digits()
    x, test_x = (
        functional.interpolate(rows.reshape(-1, 1, 8, 8), size=size, mode="bilinear")
        for rows in (data.x, data.test_x)
    )
    return Images(x, data.y, test_x, data.test_y)


def fashion_mnist(folder: Path) -> Images:
    """Return the images of Fashion-MNIST from its four idx files, packed by gzip or not."""
    x, y, test_x, test_y = (
        idx(folder / f"{part}-{kind}-ubyte")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    return Images(x[:, None] / 255, y.long(), test_x[:, None] / 255, test_y.long())


def idx(path: Path) -> Tensor:
    """Return the bytes of an idx file; its head is 0, 0, 8, the number of dimensions, and sizes."""
    data = (
        path.read_bytes()
        if path.exists()
        else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    )
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is no idx file of bytes")
    head = 4 + 4 * data[3]
    return torch.tensor(bytearray(data[head:]), dtype=torch.uint8).reshape(
        struct.unpack(f">{data[3]}I", data[4:head])
    )


def machine_with(
    gpus: int, slow: float = SLOW, links: float | None = None, latency: float = LATENCY
) -> tuple[asc.Machine, str]:
    """Return a machine with so many GPUs, and a description: real, logical, or emulated.

    Emulated ones are ``slow`` times slower than real ones, and links ``links`` times (default: as
    many).
    """
    torch.set_num_threads(1)  # each emulated GPU is a thread, with which torch's would compete
    if real := torch.accelerator.device_count():
        torch.backends.cudnn.deterministic = True  # or no two runs would be equal, bit for bit
        kind = (
            f"{gpus} real GPUs" if real >= gpus else f"{gpus} logical devices on {real} real GPUs"
        )
        return asc.Machine.local(gpus=gpus), kind
    fast = asc.Machine.emulated(gpus=gpus, link="pcie4")
    slowed, far = fast.slower(slow), fast.slower(links or slow)
    devices = [
        replace(device, launch_seconds=device.launch_seconds / slow * latency)
        for device in slowed.devices
    ]
    joined = [replace(link, latency=link.latency / (links or slow) * latency) for link in far.links]
    return asc.Machine(devices, joined, imagined=True), (
        f"{gpus} emulated GPUs, {slow:g} times slower than real ones so that this CPU can keep up;\n"
        f"PCIe 4, {links or slow:g} times slower; kernels and copies take {latency:g} times longer to start"
    )


def where(machine: asc.Machine) -> str:
    """Return the torch device on which the machine's first GPU computes."""
    gpu = machine.accelerators[0]
    return "cpu" if machine.imagined else machine.device(gpu).physical or gpu


def batches(images: Images, size: int) -> Iterator[Batch]:
    """Yield whole batches, epoch after epoch, each shuffled."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(images.y), generator=generator)
        for chosen in order.split(size)[: len(order) // size]:
            yield images.x[chosen], images.y[chosen]


def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of the test images that the network classifies correctly."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(x).argmax(1) for x in images.test_x.split(256)])
    model.train()
    return float((found == images.test_y).float().mean())


def serial_step(
    model: nn.Module, loss_fn: Loss, optimizer: torch.optim.Optimizer, batch: Batch, parts: int
) -> None:
    """Take a training step in eager PyTorch, on one part of the batch after the other."""
    optimizer.zero_grad()
    for x, y in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
        (loss_fn(model(x), y) * (len(y) / len(batch[1]))).backward()
    optimizer.step()


def different(model: nn.Module, reference: nn.Module) -> list[str]:
    """Return the names of the parameters that are not equal, bit for bit."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [name for (name, ours), theirs in pairs if not torch.equal(ours.cpu(), theirs.cpu())]


class Training(NamedTuple):
    """Measured and predicted seconds of an epoch, test accuracy, and timelines of a step."""

    epoch: Seconds
    predicted: float
    accuracy: float
    timelines: tuple[asc.Timeline, asc.Timeline]


def train(
    make: Make,
    loss_fn: Loss,
    machine: asc.Machine,
    gpus: int,
    images: Images,
    size: int,
    epochs: int,
) -> Training:
    """Train a new network on the first GPUs; the first epoch, which is for planning too, is not measured."""
    (model, optimizer), devices = make(), machine.accelerators[:gpus]
    stream, steps, seconds = batches(images, size), len(images.y) // size, []
    with asc.parallel.data_parallel(
        model, loss_fn, optimizer, machine, devices=devices, **SUMS
    ) as step:
        for _ in range(epochs):
            start = time.perf_counter()
            losses = [step(x, y) for x, y in islice(stream, steps)]
            float(losses[-1])  # waits for a real GPU
            seconds.append(time.perf_counter() - start)
        found, batch = accuracy(model, images), next(stream)
        schedule = step.schedule(*batch)
        timelines = schedule.simulate(), schedule.profile(**step.inputs(*batch))
    return Training(Seconds.of(seconds[1:]), steps * schedule.makespan, found, timelines)


def equal_to_serial(
    make: Make, loss_fn: Loss, machine: asc.Machine, images: Images, size: int
) -> bool:
    """Train on all GPUs, and serially in eager PyTorch; compare the parameters."""
    (ours, our_optimizer), (plain, plain_optimizer) = make(), make()
    plain.to(where(machine))
    with asc.parallel.data_parallel(ours, loss_fn, our_optimizer, machine, **SUMS) as step:
        for x, y in islice(batches(images, size), STEPS):
            step(x, y)
            batch = x.to(where(machine)), y.to(where(machine))
            serial_step(plain, loss_fn, plain_optimizer, batch, parts=len(machine.accelerators))
    count = sum(parameter.numel() for parameter in ours.parameters())
    names = different(ours, plain)
    found = f" ({', '.join(names)} differ)" if names else ""
    return verdict(
        f"{count:,} parameters after {STEPS} steps equal the serial ones, bit for bit{found}",
        not names,
    )


def compare_gpu_counts(
    name: str,
    make: Make,
    images: Images,
    size: int,
    epochs: int,
    least: float,
    options: argparse.Namespace,
) -> int:
    """Train on one GPU and on two, print and draw the times, and return the exit code."""
    machine, kind = machine_with(2, slow=1 if options.quick else SLOW)
    print(f"machine: {kind}\n{machine}\n", flush=True)
    loss_fn = functional.cross_entropy
    one, two = (train(make, loss_fn, machine, gpus, images, size, epochs) for gpus in (1, 2))
    trainings = {"1 GPU": one, "2 GPUs": two}
    rows = (
        (
            label,
            t.epoch,
            f"{t.predicted:.3f}",
            f"{one.epoch.mean / t.epoch.mean:.2f}",
            f"{t.accuracy:.4f}",
        )
        for label, t in trainings.items()
    )
    print(table(("", "sec/epoch", "predicted", "speed-up", "test accuracy"), *rows))
    learnt = verdict(f"test accuracy above {least}", min(one.accuracy, two.accuracy) > least)
    same = equal_to_serial(make, loss_fn, machine, images, size)
    file, (predicted, measured) = name.lower().replace("-", ""), two.timelines
    times = {label: (t.epoch, t.predicted) for label, t in trainings.items()}
    draw_times(options.folder, f"{file}_epochs", f"{name}: an epoch of training", times)
    gantt = gantt_svg(predicted, measured=measured, title=f"{name}: a training step on two GPUs")
    draw(options.folder, f"{file}_step", gantt)
    return 0 if learnt and same else 1


def draw_times(
    folder: Path | None, name: str, title: str, times: Mapping[str, tuple[Seconds, float]]
) -> None:
    """Draw measured and predicted seconds as bars, if pictures are wanted."""
    if folder:
        figure = Figure(layout="constrained", figsize=(7.5, 1.5 + 0.5 * len(times)))
        axes = figure.add_subplot(title=title, xlabel="seconds")
        places = [i - 0.2 for i in range(len(times))]
        means = [measured.mean for measured, _ in times.values()]
        deviations = [measured.deviation for measured, _ in times.values()]
        axes.barh(places, means, 0.4, xerr=deviations, label="measured")
        others = [i + 0.2 for i in range(len(times))]
        axes.barh(others, [predicted for _, predicted in times.values()], 0.4, label="predicted")
        axes.set_yticks(range(len(times)), list(times))
        axes.invert_yaxis()
        axes.legend()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.svg")


def measure(step: Step, batch: Batch, runs: int) -> Seconds:
    """Return the seconds of some steps, after one to warm up."""
    seconds = []
    for _ in range(1 + runs):
        start = time.perf_counter()
        float(step(*batch))  # waits for a real GPU
        seconds.append(time.perf_counter() - start)
    return Seconds.of(seconds[1:])


def verdict(promise: str, holds: bool) -> bool:
    """Print whether a promise holds, and return that."""
    print(f"    {promise}: {'holds' if holds else 'does NOT hold'}", flush=True)
    return holds


def table(*rows: Iterable[object]) -> str:
    """Return rows as text, the first one as head; the first column is left-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in cells
    )


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that these examples have in common."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--quick", action="store_true", help="do less of everything, and do not judge times"
    )
    made.add_argument("--folder", type=Path, help="where to draw (default: nowhere)")
    return made


def draw(folder: Path | None, name: str, svg: str) -> None:
    """Write a picture, if pictures are wanted."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(svg)
