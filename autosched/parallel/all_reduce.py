"""All-reduce: sum one flat tensor per device, on all devices.

A strategy adds the tasks of the sum to a graph: which device adds what, in which order. Copies are
not part of it: lowering inserts one wherever a value is read on another device, from the device on
which the value was computed. So a value that a device passes on must be computed there.

To add a strategy, write a function of a ``_Sum`` and the flat values, and name it in
``STRATEGIES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from autosched import Graph, Machine, ScheduleError, Value
from autosched.parallel.costs import memory_task

__all__ = ["MANY", "STRATEGIES", "added", "all_reduce"]

# Devices; with more, strategies of n * n copies, or with one device for all, are not tried.
MANY = 16

T = TypeVar("T")


def all_reduce(
    graph: Graph,
    flats: Sequence[Value],
    devices: Sequence[str],
    strategy: str = "sum",
    *,
    machine: Machine,
    numel: int,
    itemsize: int,
    name: str,
) -> list[Value]:
    """Sum flat values, one on each device, by a strategy; return the value that each device reads.

    ``flats`` are 1-D, of ``numel`` elements of ``itemsize`` bytes and one dtype, in which they are
    added. All devices read the same bits. The values are not used otherwise: a strategy may write
    them. The results must only be read, and not through views, because views are on the device
    where the total was computed. Names of tasks begin with ``name``. Raises ScheduleError for an
    unknown strategy.

    >>> graph, machine = Graph(), Machine.emulated(gpus=2)
    >>> a, b = graph.inputs("a", "b")
    >>> how = {"machine": machine, "numel": 8, "itemsize": 4, "name": "bucket"}
    >>> all_reduce(graph, [a, b], machine.accelerators, "sum", **how)
    [Value('bucket.add.cuda:0'), Value('bucket.add.cuda:0')]
    """
    if strategy not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ScheduleError(f"unknown strategy {strategy!r} to sum over devices; known are {known}")
    if len(flats) == 1 or not numel:
        return list(flats)
    return STRATEGIES[strategy](_Sum(graph, tuple(devices), machine, numel, itemsize, name), flats)


@dataclass(frozen=True)
class _Sum:
    """One all-reduce, and its possible tasks; their ``numel`` is that of the result."""

    graph: Graph
    devices: tuple[str, ...]
    machine: Machine
    numel: int
    itemsize: int
    name: str

    def add(self, a: Value, b: Value, device: str, numel: int) -> Value:
        return self._task("add", torch.add, (a, b), device, numel, 3)

    def total(self, values: Sequence[Value], device: str, numel: int) -> Value:
        n = len(values) - 1
        return self._task("add", added, (list(values),), device, numel, 3 * n, n)

    def concatenate(self, chunks: Sequence[Value], device: str) -> Value:
        return self._task("cat", torch.cat, (list(chunks),), device, self.numel, 2)

    def relay(self, value: Value, device: str, numel: int) -> Value:
        """Return a received value as one computed on the device, from which others copy it."""
        made: Value = self.graph.add(
            same, value, name=self._fresh("relay", device), on=device, aliases=value,
            seconds={device: 0.0}, nbytes=numel * self.itemsize,
        )  # fmt: skip
        return made

    def split(self, flat: Value, numel: int) -> tuple[Value, ...]:
        """Return views of chunks of this many elements each; the last may have fewer."""
        count = -(-self.numel // numel)
        label = self.graph.fresh(f"{self.name}.split")
        nbytes = numel * self.itemsize
        chunks: tuple[Value, ...] = self.graph.add(
            torch.split, flat, numel, name=label, outputs=count, nbytes=nbytes
        )
        return chunks

    def _task(
        self, what: str, fn: Callable[..., torch.Tensor], args: Sequence[object],
        device: str, numel: int, accesses: int, launches: int = 1,
    ) -> Value:  # fmt: skip
        nbytes = numel * self.itemsize
        made: Value = memory_task(
            self.graph, self.machine, device, fn, *args, accessed=accesses * nbytes,
            launches=launches, name=self._fresh(what, device), nbytes=nbytes, reuse=True,
        )  # fmt: skip
        return made

    def _fresh(self, what: str, device: str) -> str:
        return self.graph.fresh(f"{self.name}.{what}.{device}")


def same(tensor: T) -> T:
    """Return the argument."""
    return tensor


def added(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum, in order."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = torch.add(total, tensor, out=out)
    return total


# ---- strategies


def on_first(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Sum on the first device, in the order of the devices; all others read it there.

    r0 + r1 + r2 ...; (n - 1) N bytes into the first device and as many out of it.
    """
    return _on_one(of, flats, of.devices[0])


def on_host(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Sum on the host, in the order of the devices; all read it there.

    r0 + r1 + r2 ...; N bytes from each device to the host, and back.
    """
    return _on_one(of, flats, of.machine.host)


def ring(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Sum n chunks concurrently, each on its way around the ring, then send each around again.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    2009. 2 (n - 1) / n N bytes from each device to the next, in 2 (n - 1) copies. Chunk k ends on
    device k: r(k+1) + r(k+2) + ... + rk. So the order of a sum, and with more than two devices its
    rounding, depends on the position of the element.
    """
    n = len(flats)
    size = -(-of.numel // n)
    chunks = [of.split(flat, size) for flat in flats]
    last = [chunks[(k + 1) % n][k] for k in range(len(chunks[0]))]
    # 1. Reduce-scatter: each device adds its chunk to the partial sum of the previous device.
    for step in range(2, n + 1):
        for k, partial in enumerate(last):
            device = (k + step) % n
            last[k] = of.add(partial, chunks[device][k], of.devices[device], size)
    # 2. All-gather: each device passes on the totals that it has received.
    read = [list(last) for _ in range(n)]  # by device and chunk
    for step in range(1, n):
        for k, total in enumerate(last):
            device = (k + step) % n
            if step < n - 1:
                last[k] = of.relay(total, of.devices[device], size)
            read[device][k] = last[k]
    return [of.concatenate(own, device) for own, device in zip(read, of.devices, strict=True)]


def exchange(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Reduce-scatter within each node, all-reduce over nodes, and all-gather within each node.

    (r0 + r1 + ...) + (...) + ..., a node in brackets; nodes are found from the rates of links. For
    g devices in each of m nodes, 2 (g - 1) / g N bytes from each device to others of its node, and
    2 (m - 1) / m N / g to other nodes. If nodes differ in size, all devices are treated as one
    node. As many copies as in a ring, which do not wait for each other.
    """
    nodes = _nodes(of)
    if len(nodes) == 1:
        return _exchanged(of, flats)
    inner = [replace(of, devices=tuple(of.devices[i] for i in node)) for node in nodes]
    own = [[flats[i] for i in node] for node in nodes]
    sums = list(map(_scattered, inner, own))
    size = -(-of.numel // len(nodes[0]))
    totals = []  # by chunk and node
    for k, row in enumerate(zip(*sums, strict=True)):
        owners = tuple(one.devices[k] for one in inner)
        chunk = replace(of, devices=owners, numel=min(size, of.numel - k * size))
        totals.append(_exchanged(chunk, row))
    found: dict[int, Value] = {}
    for node, chunks in zip(nodes, zip(*totals, strict=True), strict=True):
        found.update((i, of.concatenate(chunks, of.devices[i])) for i in node)
    return [found[i] for i in range(len(flats))]


def gather(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Sum on each device, in the order of the devices, what all others send.

    r0 + r1 + r2 ...; (n - 1) N bytes into each device and as many out of it, all at once: for two
    devices as many as with ``exchange``, in half as many copies.
    """
    return [of.total(flats, device, of.numel) for device in of.devices]


STRATEGIES: Mapping[str, Callable[[_Sum, Sequence[Value]], list[Value]]] = {
    "sum": on_first,
    "cpu": on_host,
    "ring": ring,
    "exchange": exchange,
    "gather": gather,
}


def _on_one(of: _Sum, flats: Sequence[Value], device: str) -> list[Value]:
    total = flats[0]
    for flat in flats[1:]:
        total = of.add(total, flat, device, of.numel)
    return [total] * len(flats)


def _scattered(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    """Return the sum of each chunk, each on one device (reduce-scatter)."""
    size = -(-of.numel // len(flats))
    chunks = [of.split(flat, size) for flat in flats]
    return [of.total(row, of.devices[k], size) for k, row in enumerate(zip(*chunks, strict=True))]


def _exchanged(of: _Sum, flats: Sequence[Value]) -> list[Value]:
    sums = _scattered(of, flats)
    return [of.concatenate(sums, device) for device in of.devices]


def _nodes(of: _Sum) -> list[list[int]]:
    """Return the devices (their numbers) of each node: those connected by the fastest links."""

    def rate(a: str, b: str) -> float:
        link = of.machine.link(a, b)
        return math.inf if a == b else 0.0 if link is None else link.bytes_per_second

    first, *others = of.devices
    fastest = max((rate(first, device) for device in others), default=math.inf)
    nodes: list[list[int]] = []
    for i, device in enumerate(of.devices):
        own = next((node for node in nodes if rate(of.devices[node[0]], device) >= fastest), None)
        if own is None:
            nodes.append([i])
        else:
            own.append(i)
    return nodes if len({len(node) for node in nodes}) == 1 else [list(range(len(of.devices)))]
