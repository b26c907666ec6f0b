"""Predict training steps on 1 to 64 GPUs: data parallel, pipelines, and replicas of pipelines.

Two networks at their true size, captured on tensors without data: ResNet-50, and a transformer of
48 layers that is 1,600 wide (as GPT-2 XL). Nothing is computed. The optimizer is SGD with momentum.
The machine has nodes of 8 GPUs. A GPU reaches 300 TFLOP/s and 2.5 TB/s, about the rates of float32
on an H100's tensor cores, takes 5 us to launch an operator, and has 80 GB. In a node each two are
connected by NVLink, 360 GB/s and 10 us; between nodes each GPU has its own network card, 40 GB/s
and 20 us.

What the model leaves out: a link connects two devices, and copies do not contend for the link but
for two copy streams, one out of and one into each GPU, so a switch is as fast as its ports. A GPU
has those two for NVLink and the network together. One host represents those of all nodes, with a
link of 50 GB/s to each GPU, and has the whole batch. Operators have roofline costs, for all shapes;
there is no noise, and there are no stragglers.

* efficiency: throughput over that of as many independent GPUs.
* idle: the share of time in which GPUs compute nothing, on average.
* hidden: the share of the time of copies into a GPU in which it computes.
* bound / time: the bound is one for all schedules of the same tasks on the same devices: the work
  of the busiest GPU plus the shortest chains that must precede and follow it, or ``lower_bound`` of
  the schedule (which includes copies), whichever is longer; marked (w) or (c).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _report import options, picture, publish, table
from pipeline import ResNet50, bound
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.viz import charts

NODE = 8
GPU = {
    "flops_per_second": 300e12,
    "bytes_per_second": 2.5e12,
    "launch_seconds": 5e-6,
    "nbytes": 80e9,
}
NVLINK, NETWORK, HOST = (360e9, 1e-5), (40e9, 2e-5), (50e9, 1e-5)  # bytes per second, latency
CHUNKS = (16, 32, 64)  # micro-batches of each pipeline, to choose among
SEVERAL = 16  # times what one GPU computes at once, in the batch that stays the same


def machine(gpus: int) -> asc.Machine:
    """Return nodes of 8 GPUs, and a host."""
    names = [f"cuda:{i}" for i in range(gpus)]
    links = [asc.Link("cpu", name, *HOST) for name in names]
    links += [
        asc.Link(names[a], names[b], *(NVLINK if a // NODE == b // NODE else NETWORK))
        for b in range(gpus)
        for a in range(b)
    ]
    devices = [asc.Device("cpu", 1, 1e12, 100e9), *(asc.Device(name, 1, **GPU) for name in names)]
    return asc.Machine(devices, links, imagined=True)


class Layer(nn.Module):
    """Attention and two products, each after a layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape: sequences, positions, width."""
        split = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Radford et al., "Language models are unsupervised multitask learners", 2019: the largest by default."""

    def __init__(
        self,
        layers: int = 48,
        width: int = 1600,
        heads: int = 25,
        words: int = 50_257,
        length: int = 1024,
    ):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of the next word, by word first, for each position."""
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x))).transpose(1, 2)


@dataclass(frozen=True)
class Net:
    """A network, the rows a GPU computes at once, the bytes of a bucket of gradients, numbers of GPUs, batches."""

    name: str
    make: Callable[[], nn.Module]
    rows: int
    bucket: float
    gpus: tuple[int, ...]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, 3, 224, 224), torch.empty(rows, dtype=torch.long)


def texts(rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, 1024, dtype=torch.long), torch.empty(rows, 1024, dtype=torch.long)


NETS = (
    Net("ResNet-50", ResNet50, 64, 25e6, (1, 2, 4, 8, 16, 32, 64), images),
    Net("transformer", Transformer, 4, 250e6, (1, 8, 64), texts),
)


@dataclass(frozen=True)
class Point:
    """The plan for a number of GPUs."""

    gpus: int
    rows: int
    seconds: float
    idle: float
    hidden: float
    bound: float
    by: str
    chosen: str
    tasks: int
    planning: float

    @property
    def throughput(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds


def planned(gpus: int, rows: int, plan: Callable[[], tuple[asc.Schedule, str]]) -> Point:
    """Plan a step, and return the figures of its schedule."""
    start = time.perf_counter()
    schedule, chosen = plan()
    planning = time.perf_counter() - start
    timeline = schedule.simulate()
    busy = sum(
        span.seconds
        for span in timeline.spans
        if span.kind == "run" and span.streams[0].device != "cpu"
    )
    work, copies = bound(schedule), schedule.lower_bound
    return Point(
        gpus, rows, timeline.makespan, 1 - busy / (gpus * timeline.makespan), hidden(timeline), max(work, copies),
        "w" if work >= copies else "c", chosen, len(schedule.graph), planning,
    )  # fmt: skip


def hidden(timeline: asc.Timeline) -> float:
    """Return the share of the time of copies into GPUs in which these compute."""
    of: dict[str, list[Any]] = {}
    for span in timeline.spans:
        if span.streams[-1].device != "cpu":  # the last stream of a copy is on its destination
            of.setdefault(span.streams[-1].device, []).append(span)
    found = [
        (
            asc.Timeline(tuple(spans)).overlap().copies_hidden,
            sum(s.seconds for s in spans if s.kind == "copy"),
        )
        for spans in of.values()
    ]
    total = sum(seconds for _, seconds in found)
    return sum(share * seconds for share, seconds in found) / total if total else 1.0


class Ways:
    """The ways to train one network."""

    def __init__(self, net: Net):
        self.net = net
        with torch.device("meta"):
            model = net.make()
        self.model = model.to_empty(device="cpu")  # untouched memory is not allocated
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def _system(self, way: Any, gpus: int, **how: Any) -> Any:
        return way(
            self.model,
            functional.cross_entropy,
            self.optimizer,
            machine(gpus),
            buckets=(2**20, self.net.bucket),
            **how,
        )

    def data_parallel(self, gpus: int, rows: int) -> Point:
        """Train data parallel, in micro-batches of at most what a GPU computes at once."""
        each = -(-rows // gpus)
        several = -(-each // self.net.rows)

        def plan() -> tuple[asc.Schedule, str]:
            step = self._system(asc.parallel.data_parallel, gpus, accumulate=several)
            batch = self.net.batch(rows)
            return step.schedule(*batch), step.notes(*batch)["reduction"] if gpus > 1 else ""

        return planned(gpus, rows, plan)

    def pipeline(
        self,
        gpus: int,
        rows: int,
        replicas: int = 1,
        order: str = "auto",
        chunks: Sequence[int] = CHUNKS,
    ) -> Point:
        """Train by pipelines, with the order and the number of micro-batches that are predicted to be fastest."""
        batch = self.net.batch(rows)

        def plan() -> tuple[asc.Schedule, str]:
            how: dict[str, Any] = {"schedule": order, "chunks": chunks[0], "replicas": replicas}
            if len(chunks) > 1:
                some = self._system(asc.parallel.pipeline, gpus, schedule=order, replicas=replicas)
                best = some.curve(*batch, chunks=[n for n in chunks if n * replicas <= rows]).best
                how |= {"schedule": best.order, "chunks": best.chunks}
            step = self._system(asc.parallel.pipeline, gpus, **how)
            made = step.schedule(*batch)
            notes = step.notes(*batch)
            words = [
                notes["order"],
                f"{notes['chunks']} micro-batches",
                notes["reduction"] if replicas > 1 else "",
            ]
            return made, ", ".join(filter(None, words))

        return planned(gpus, rows, plan)


def weak(ways: Ways, counts: Sequence[int], **how: Any) -> Iterator[tuple[str, list[Point]]]:
    """Yield names and points of data parallel training and of pipelines; the batch grows with the number of GPUs."""
    rows = ways.net.rows
    yield "data parallel", [ways.data_parallel(n, n * rows) for n in counts]
    yield "one pipeline", [ways.pipeline(n, n * rows, **how) for n in counts if n > 1]
    nodes = [n for n in counts if n > NODE]
    if nodes:
        yield f"pipelines of {NODE}", [ways.pipeline(n, n * rows, n // NODE, **how) for n in nodes]


def lines(name: str, points: Sequence[Point], alone: Point) -> Iterator[Sequence[str]]:
    for p in points:
        yield (
            f"{name}, {p.gpus}", f"{p.rows:,}", f"{p.seconds * 1e3:,.1f}", f"{_efficiency(p, alone):.1%}",
            f"{p.idle:.1%}", f"{p.hidden:.1%}", f"{p.bound / p.seconds:.1%} ({p.by})", p.chosen, f"{p.tasks:,}",
            f"{p.planning:.1f}",
        )  # fmt: skip


def _efficiency(point: Point, alone: Point) -> float:
    return point.throughput / point.gpus / alone.throughput


def chart(title: str, curves: Sequence[tuple[str, Sequence[Point]]], alone: Point) -> str:
    """Return efficiency by number of GPUs, and the bounds, as SVG."""
    found = {}
    for name, points in curves:
        found[name] = [(p.gpus, _efficiency(p, alone)) for p in points]
        bounds = [(p.gpus, _efficiency(p, alone) * p.seconds / p.bound) for p in points]
        found[f"{name}: bound"] = bounds
    return charts.lines(found, title=title, x="GPUs", y="efficiency", log_x=True)


HEAD = (
    "way, GPUs", "batch", "ms", "efficiency", "idle", "hidden", "bound / time", "chosen", "tasks", "planned in s",
)  # fmt: skip


def main() -> None:
    chosen = options(__doc__)
    parts: list[str] = []
    how: dict[str, Any] = {"order": "1f1b", "chunks": [32]} if chosen.quick else {}
    for net in NETS[:1] if chosen.quick else NETS:
        counts = (1, NODE) if chosen.quick else net.gpus
        ways = Ways(net)
        curves = list(weak(ways, counts, **how))
        alone = curves[0][1][0]
        rows = [line for name, points in curves for line in lines(name, points, alone)]
        parts += [f"## {net.name}: {net.rows} rows for each GPU", table(HEAD, rows)]
        if not chosen.quick:
            fixed = [ways.data_parallel(n, SEVERAL * net.rows) for n in counts]
            curves.append(("data parallel, one batch", fixed))
            parts += [
                f"### {SEVERAL * net.rows:,} rows in all",
                table(HEAD, lines("data parallel", fixed, alone)),
            ]
        svg = chart(f"{net.name} on 1 to {counts[-1]} GPUs", curves, alone)
        parts += picture(f"scale-{net.name.lower()}", "efficiency by number of GPUs", svg, chosen)
    publish("scale", "Training steps on 1 to 64 GPUs, predicted", [_about(), *parts], chosen)


def _about() -> str:
    return (__doc__ or "").partition("\n\n")[2].rstrip()


if __name__ == "__main__":
    main()
