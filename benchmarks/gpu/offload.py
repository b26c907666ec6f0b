"""A model larger than the memory that it may use: weights come from page-locked host memory while the GPU computes.

Dense layers of one size. ``compute`` has all weights on the GPU, ``copies`` only brings them there; no schedule takes
less than the longer of these, and the first copy can hide behind nothing. Ours is planned for a machine with that limit
(``Device.nbytes``), and is told nothing else; ``by hand`` is ``StreamedWeights`` of ``by_hand.py`` with as many buffers
as the limit has room for. Hidden is the share of the shorter part: (compute + copies - together) / shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import by_hand
import torch
from _record import Case, Promise, predicted
from _rig import Rig
from contestants import Entry, close, entered, linked, measured, raced, replaying
from torch import Tensor

import autosched as asc

ROUNDS = 15
HIDDEN = 0.95
BY_HAND = 1.02  # times the code by hand
BUFFERS = 4  # layers' weights for which there is room beside the activations


class Size(NamedTuple):
    """Layers, features of each, and rows of a batch."""

    layers: int
    features: int
    rows: int


def cases(rig: Rig) -> dict[str, Callable[[], Case]]:
    """Return a case in which compute takes longer than copies, and one the other way round."""
    sizes = [Size(4, 16, 16)] if rig.rehearse else [Size(48, 4096, 8192), Size(48, 4096, 1024)]
    return {
        f"{n} layers of {k}, {rows} rows": partial(_case, rig, Size(n, k, rows))
        for n, k, rows in sizes
    }


def streamed(gpu: str, layers: int) -> asc.Graph:
    """Return layers whose weights live on the host."""
    graph = asc.Graph("offload")
    weights = [graph.input(f"w{i}") for i in range(layers)]
    with graph.on(gpu):
        x = graph.input("x")
        for weight in weights:
            x = torch.relu(x @ weight)
    graph.output(y=x)
    return graph


def limit(size: Size) -> float:
    """Return the bytes for some layers' weights and four layers' activations."""
    return 4.0 * (BUFFERS * size.features**2 + 4 * size.rows * size.features)


def _case(rig: Rig, size: Size) -> Case:
    x = rig.random(size.rows, size.features)
    weights = [rig.pinned(size.features, size.features) for _ in range(size.layers)]
    entries, reasons = entered(rig, _makers(rig, size, x, weights))
    wanted = x
    for weight in weights:
        wanted = torch.relu(wanted @ weight.to(rig.device))
    for name in entries.keys() - {"copies"}:
        found = entries[name].call()
        assert torch.allclose(
            found["y"] if isinstance(found, dict) else found, wanted, rtol=1e-3, atol=0.0
        ), name
    seconds = raced(rig, entries, reasons, ROUNDS)
    promises = [*_promises(seconds, entries), *_peak(rig, entries, limit(size))]
    close(entries)
    total = 4 * size.layers * size.features**2
    return Case(
        seconds,
        promises,
        reasons,
        {"MB of weights": total // 10**6, "MB in all": int(limit(size) / 1e6)},
    )


def _makers(
    rig: Rig, size: Size, x: Tensor, weights: Sequence[Tensor]
) -> dict[str, partial[Entry]]:
    hand = by_hand.StreamedWeights(rig, weights, BUFFERS)
    return {
        "compute": partial(_resident, rig, x, weights),
        "copies": partial(_copies, rig, weights),
        "one by one": partial(_one_by_one, rig, x, weights),
        "by hand": partial(Entry, partial(hand, x)),
        "autosched": partial(_ours, rig, size, x, weights, False),
        "autosched, replay": partial(_ours, rig, size, x, weights, True),
    }


def _resident(rig: Rig, x: Tensor, weights: Sequence[Tensor]) -> Entry:
    there = [weight.to(rig.device) for weight in weights]

    def call() -> Tensor:
        y = x
        for weight in there:
            y = torch.relu(y @ weight)
        return y

    return Entry(call)


def _copies(rig: Rig, weights: Sequence[Tensor]) -> Entry:
    buffer = torch.empty(weights[0].shape, device=rig.device)

    def call() -> None:
        for weight in weights:
            buffer.copy_(weight, non_blocking=True)

    return Entry(call)


def _one_by_one(rig: Rig, x: Tensor, weights: Sequence[Tensor]) -> Entry:
    def call() -> Tensor:
        y = x
        for weight in weights:
            y = torch.relu(y @ weight.to(rig.device))
        return y

    return Entry(call)


def _ours(rig: Rig, size: Size, x: Tensor, weights: Sequence[Tensor], replayed: bool) -> Entry:
    graph, inputs = (
        streamed(rig.names[0], size.layers),
        {"x": x} | {f"w{i}": w for i, w in enumerate(weights)},
    )
    free = linked(rig, rig.machine(1))
    how = replaying(rig) if replayed else {}
    costs = measured(rig, graph, free, inputs, replayed)
    devices = rig.machine(1, nbytes=limit(size)).devices
    machine = asc.Machine(devices, free.links, imagined=free.imagined)
    schedule = asc.schedule(graph, machine, costs=costs, **how)
    return Entry(partial(schedule, **inputs), schedule)


def _promises(seconds: Mapping[str, float], entries: Mapping[str, Entry]) -> Iterator[Promise]:
    for name in ("by hand", "autosched", "autosched, replay"):
        if name not in seconds:
            continue
        if seconds.keys() >= {"compute", "copies"}:
            parts = seconds["compute"], seconds["copies"]
            hidden = (sum(parts) - seconds[name]) / min(parts)
            yield Promise(f"{name}: hidden", hidden, least=HIDDEN)
            yield Promise(
                f"{name} / longer part", seconds[name] / max(parts), most=1 + (1 - HIDDEN)
            )
        if name != "by hand":
            if "by hand" in seconds:
                yield Promise(f"{name} / by hand", seconds[name] / seconds["by hand"], most=BY_HAND)
            if schedule := entries[name].schedule:
                yield predicted(schedule.makespan, seconds[name], name)


def _peak(rig: Rig, entries: Mapping[str, Entry], allowed: float) -> Iterator[Promise]:
    """Compare the bytes that a run adds to what is there with the limit, and with what was predicted."""
    entry = entries.get("autosched")
    if entry is None or entry.schedule is None or not rig.cuda:
        return
    entry.call()
    rig.settle()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    entry.call()
    rig.settle()
    held = (
        torch.cuda.max_memory_allocated() - before + entry.schedule.costs.nbytes["x"]
    )  # which was there before
    yield Promise("bytes held / limit", held / allowed, most=1.05)
    yield Promise(
        "bytes held / predicted", held / entry.schedule.peak_bytes[rig.names[0]], 0.95, 1.05
    )
