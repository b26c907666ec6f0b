"""The chapter "Automatic Parallelism" of Dive into Deep Learning: products of 4000x4000, and copies to the CPU.

http://d2l.ai/chapter_computational-performance/auto-parallelism.html. What is done at once must take no longer than the
longer part of it. The chapter reports 2.42 s of products and 0.51 s of copies apart, and 1.96 s together.
``by hand`` is ``ProductsAndCopies`` of ``by_hand.py``, with host memory of its own that it writes again and again; ours
hands out fresh memory each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import by_hand
import torch
from _record import Case, Promise, predicted
from _rig import Rig
from contestants import Entry, close, entered, linked, measured, raced, replaying
from torch import Tensor

import autosched as asc

ROUNDS = 15
TOGETHER = 1.05  # times the longer part
BY_HAND = 1.02  # times the code by hand


def cases(rig: Rig) -> dict[str, Callable[[], Case]]:
    """Return the two experiments."""
    size, count = _sizes(rig)
    return {
        f"{count} products of {size} on each of two GPUs": lambda: _two_gpus(rig),
        f"{count} products of {size} and copies to the CPU": lambda: _products_and_copies(rig),
    }


def _sizes(rig: Rig) -> tuple[int, int]:
    """Return the size of a matrix and how many products there are."""
    return (8, 4) if rig.rehearse else (4000, 50)


def products(graph: asc.Graph, gpu: str, count: int) -> list[asc.Value]:
    """Add products of an input, which lives on a GPU."""
    with graph.on(gpu):
        x = graph.input(f"x_{gpu}")
        return [x.mm(x) for _ in range(count)]


def _two_gpus(rig: Rig) -> Case:
    """Compute on two GPUs; on one card, if there is one: then both together take what both take."""
    size, count = _sizes(rig)
    machine = linked(rig, rig.machine(2))

    def on(*gpus: str) -> Entry:
        graph = asc.Graph("products")
        for gpu in gpus:
            graph.output(
                **{f"{gpu}_{i}": value for i, value in enumerate(products(graph, gpu, count))}
            )
        where = {gpu: rig.device if rig.real < 2 else torch.device(gpu) for gpu in gpus}
        inputs = {f"x_{gpu}": rig.random(size, size).to(where[gpu]) for gpu in gpus}
        schedule = asc.schedule(graph, machine, costs=measured(rig, graph, machine, inputs))
        return Entry(partial(schedule, **inputs), schedule)

    first, second = rig.names
    makers = {
        "first": partial(on, first),
        "second": partial(on, second),
        "together": partial(on, first, second),
    }
    entries, reasons = entered(rig, makers)
    seconds = raced(rig, entries, reasons, ROUNDS)
    promises = []
    if seconds.keys() >= makers.keys():
        alone = seconds["first"], seconds["second"]
        least = max(alone) if rig.real != 1 else sum(alone)
        what = "together / longer" if rig.real != 1 else "together / both, as both are one card"
        promises.append(Promise(what, seconds["together"] / least, most=TOGETHER))
    close(entries)
    return Case(seconds, promises, reasons)


def _products_and_copies(rig: Rig) -> Case:
    """Compute on a GPU, copy to the CPU, and both at once: by hand and by us."""
    size, count = _sizes(rig)
    x, machine, gpu = rig.random(size, size), linked(rig, rig.machine(1)), rig.names[0]

    def ours(to_cpu: bool, **how: Any) -> Entry:
        graph = asc.Graph("products")
        graph.output(*products(graph, gpu, count))
        inputs = {f"x_{gpu}": x}
        costs = measured(rig, graph, machine, inputs, bool(how))
        schedule = asc.schedule(
            graph, machine, costs=costs, outputs="cpu" if to_cpu else None, **how
        )
        return Entry(partial(schedule, **inputs), schedule)

    def copies() -> Entry:
        graph, made = asc.Graph("copies"), {f"y{i}": x.mm(x) for i in range(count)}
        with graph.on(gpu):
            graph.output(*graph.inputs(*made))
        costs = asc.Costs.estimate(graph, made)
        schedule = asc.schedule(graph, machine, costs=costs, outputs="cpu")
        return Entry(partial(schedule, **made), schedule)

    hand = by_hand.ProductsAndCopies(rig, x, count)
    makers = {
        "products": lambda: ours(False),
        "copies": copies,
        "by hand": lambda: Entry(hand),
        "autosched": lambda: ours(True),
        "autosched, replay": lambda: ours(True, **replaying(rig)),
    }
    entries, reasons = entered(rig, makers)
    _check(entries, x)
    seconds = raced(rig, entries, reasons, ROUNDS)
    promises = list(_promises(seconds, entries))
    close(entries)
    return Case(seconds, promises, reasons)


def _check(entries: Mapping[str, Entry], x: Tensor) -> None:
    """Raise unless the copies are the products: the host may read what was handed out, at once."""
    wanted = x.mm(x).cpu()
    for name in ("by hand", "autosched", "autosched, replay"):
        if name in entries:
            found = entries[name].call()
            for one in found.values() if isinstance(found, dict) else found:
                assert torch.allclose(one, wanted), name


def _promises(seconds: Mapping[str, float], entries: Mapping[str, Entry]) -> Iterator[Promise]:
    for name in ("autosched", "autosched, replay"):
        if name in seconds:
            if seconds.keys() >= {"products", "copies"}:
                longer = max(seconds["products"], seconds["copies"])
                yield Promise(f"{name} / longer part", seconds[name] / longer, most=TOGETHER)
            if "by hand" in seconds:
                yield Promise(f"{name} / by hand", seconds[name] / seconds["by hand"], most=BY_HAND)
            if schedule := entries[name].schedule:
                yield predicted(schedule.makespan, seconds[name], name)
