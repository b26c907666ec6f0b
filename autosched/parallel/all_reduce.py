"""All-reduce: sum one flat tensor per device, on all devices; buckets of gradients, and compression.

A strategy adds the tasks of the sum to a graph: which device adds what, in which order. Copies are
not part of it: lowering inserts one wherever a value is read on another device, from the device on
which the value was computed. So a value that a device passes on must be computed there.

To add a strategy, write a function of a ``_Sum`` and the flat values, and name it in
``STRATEGIES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from autosched import Costs, Graph, Machine, ScheduleError, Value, Work
from autosched.parallel.costs import memory_task, relayed

# Devices; with more, strategies of n * n copies, or with one device for all, are not tried.
MANY = 16


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
    where the total was computed. Names of tasks begin with ``name``.

    >>> graph, machine = Graph(), Machine.emulated(gpus=2)
    >>> a, b = graph.inputs("a", "b")
    >>> how = {"machine": machine, "numel": 8, "itemsize": 4, "name": "bucket"}
    >>> all_reduce(graph, [a, b], machine.accelerators, "sum", **how)
    [Value('bucket.add.cuda:0'), Value('bucket.add.cuda:0')]
    """
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
        """Return a received value as one computed on the device."""
        name = f"{self.name}.relay.{device}"
        return relayed(self.graph, value, device, numel * self.itemsize, name)

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
            launches=launches, name=self.graph.fresh(f"{self.name}.{what}.{device}"),
            nbytes=nbytes, reuse=True,
        )  # fmt: skip
        return made


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


# ---- buckets
#
# A few large messages cost less than many small ones, but the first should be sent early, while
# backward continues.


SIZES = (2**20, 25 * 2**20)  # bytes: DistributedDataParallel's


def buckets(
    tensors: Sequence[tuple[str, int, Hashable]], sizes: Sequence[float] = SIZES
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors in each bucket.

    ``tensors`` are ``(name, nbytes, dtype)`` in the order in which they become ready. A bucket has
    one dtype and is closed as soon as it has its size, so only its last tensor may exceed the size.
    The first size is for the first bucket of each dtype, the next for the next, the last for all
    others; 0 puts each tensor in a bucket of its own. Buckets are in the order of their first
    tensors. This is the rule of DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB
    2020). Raises ScheduleError for invalid or missing sizes.

    >>> tensors = [("fc.bias", 40), ("fc.weight", 4000), ("conv.weight", 600)]
    >>> buckets([(*tensor, "float32") for tensor in tensors], sizes=(1000, 5000))
    (('fc.bias', 'fc.weight'), ('conv.weight',))
    """
    check_sizes(sizes)
    made: list[list[str]] = []
    closed: dict[Hashable, int] = {}  # number by dtype
    open_: dict[Hashable, tuple[list[str], int]] = {}  # by dtype, and its bytes so far
    for name, nbytes, dtype in tensors:
        if dtype not in open_:
            made.append([])
        bucket, so_far = open_.pop(dtype, (made[-1], 0))
        bucket.append(name)
        count = closed.get(dtype, 0)
        if so_far + nbytes >= sizes[min(count, len(sizes) - 1)]:
            closed[dtype] = count + 1
        else:
            open_[dtype] = bucket, so_far + nbytes
    return tuple(map(tuple, made))


def check_sizes(sizes: Sequence[float]) -> None:
    """Raise ScheduleError unless these are sizes of buckets."""
    numbers = not isinstance(sizes, str) and isinstance(sizes, Sequence) and len(sizes) > 0
    if not numbers or not all(isinstance(size, (int, float)) and size >= 0 for size in sizes):
        raise ScheduleError(
            f"sizes of buckets must be one or more numbers of bytes, 0 or more, got {sizes!r}"
        )


# ---- compression
#
# The rounding error of a message, the residual, stays on its device and is added to the next message
# (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
# feedback fixes SignSGD", ICML 2019). So over all steps, the applied updates plus the residuals are
# the sum of the gradients, up to rounding. Each device gets the messages of all others, decodes them,
# and adds them in the order of the devices, so all have the same bits. That is n - 1 messages into
# each device, where a ring transfers 2 (n - 1) / n of the whole: half precision saves nothing with 4
# devices or more. A NaN or an infinity appears in the total, but not in the residual.


class Compression(Protocol):
    """How a flat tensor is encoded as a payload, one tensor, and how a payload is decoded."""

    def encode(self, flat: Tensor) -> Tensor:
        """Return the payload of a 1-D tensor, in newly allocated memory."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded 1-D tensor, in newly allocated memory."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the size of a payload."""


@dataclass(frozen=True)
class Half:
    """Send each element in half precision: half the bytes of float32.

    Each is off by at most 2^-11 of itself (bfloat16: 2^-8) as long as it is normal there: float16
    from 6.1e-5 to 65504, below that by at most 3e-8. Raises ScheduleError for another format.

    >>> Half().nbytes(1000, torch.float32)
    2000
    """

    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ScheduleError(f"Half sends torch.float16 or torch.bfloat16, got {self.dtype!r}")

    def encode(self, flat: Tensor) -> Tensor:
        """Round."""
        return flat.to(self.dtype, copy=True)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Widen."""
        return payload.to(dtype, copy=True)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return 2 bytes per element."""
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class Int8:
    """Send each element as a multiple, -127 to 127, of the largest absolute value / 127, the scale.

    One byte per element, and the scale. Each element is off by at most half the scale, and by
    rounding. One that is NaN or infinite makes all elements NaN or infinite.

    >>> Int8().nbytes(1000, torch.float32)
    1004
    """

    def encode(self, flat: Tensor) -> Tensor:
        """Return the scale's bytes, then one byte per element."""
        wide = flat.to(_scale_of(flat.dtype))
        largest = wide.abs().amax(0, keepdim=True) if len(flat) else wide.new_zeros(1)
        scale = (largest / 127).clamp(min=torch.finfo(wide.dtype).tiny)
        return torch.cat([scale.view(torch.int8), (wide / scale).round_().to(torch.int8)])

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Multiply with the scale."""
        wide = _scale_of(dtype)
        scale = payload[: wide.itemsize].view(wide)
        return (payload[wide.itemsize :].to(wide) * scale).to(dtype)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return 1 byte per element, and the scale's."""
        return numel + _scale_of(dtype).itemsize


@dataclass(frozen=True)
class TopK:
    """Send the share of elements that is largest in absolute value, with their positions.

    Their number is rounded up; positions are int32. The k of d elements that are sent have at least
    k/d of the sum of squares (Stich et al., "Sparsified SGD with memory", NeurIPS 2018). Raises
    ScheduleError unless the share is above 0 and at most 1.

    >>> TopK(share=0.01).nbytes(1000, torch.float32)
    80
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ScheduleError(
                f"TopK sends a share of the elements above 0 and at most 1, got {self.share!r}"
            )

    def count(self, numel: int) -> int:
        """Return the number of elements that are sent."""
        return min(numel, math.ceil(self.share * numel))

    def encode(self, flat: Tensor) -> Tensor:
        """Return the values' bytes, then those of their positions."""
        # NaN counts as largest.
        _, positions = torch.topk(flat.abs(), self.count(len(flat)), sorted=False)
        values = flat[positions].view(torch.uint8)
        return torch.cat([values, positions.to(torch.int32).view(torch.uint8)])

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Put the values into zeros."""
        split = self.count(numel) * dtype.itemsize
        values = payload[:split].view(dtype)  # aligned
        positions = payload[split:].clone().view(torch.int32)
        return values.new_zeros(numel).index_copy_(0, positions.long(), values)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the value, and 4, for each element that is sent."""
        return self.count(numel) * (dtype.itemsize + torch.int32.itemsize)


def compressed_all_reduce(
    graph: Graph,
    flats: Sequence[Value],
    devices: Sequence[str],
    compression: Compression,
    *,
    machine: Machine,
    numel: int,
    dtype: torch.dtype,
    name: str,
) -> tuple[list[Value], tuple[str, ...]]:
    """Sum flat values, one on each device, by payloads; return the totals, and names of inputs.

    ``flats`` are 1-D, of ``numel`` elements of ``dtype``. The inputs, one per device, hold the
    residual of that device: pass ``torch.zeros(numel, dtype=dtype)`` at the start, and the same
    tensors in later runs; steps write them. One device, or an empty tensor, sends nothing and needs
    no input. Names begin with ``name``. Raises ScheduleError for more elements than an int32 can
    count.

    >>> graph, machine = Graph(), Machine.emulated(gpus=2)
    >>> a, b = graph.inputs("a", "b")
    >>> how = {"machine": machine, "numel": 8, "dtype": torch.float32, "name": "bucket"}
    >>> _, residuals = compressed_all_reduce(graph, [a, b], machine.accelerators, Int8(), **how)
    >>> residuals
    ('bucket.residual.0', 'bucket.residual.1')
    """
    if numel > torch.iinfo(torch.int32).max:
        raise ScheduleError(
            f"a bucket to be compressed can have 2^31 - 1 elements, {name!r} has {numel}"
        )
    if len(flats) == 1 or not numel:
        return list(flats), ()
    encoding, decoding = _work(compression, len(flats), numel, dtype)
    whole = numel * dtype.itemsize
    payloads = []
    residuals = []
    for i, (flat, device) in enumerate(zip(flats, devices, strict=True)):
        with graph.on(device):
            residual = graph.input(f"{name}.residual.{i}", nbytes=whole)
        residuals.append(residual.name)
        payload = memory_task(
            graph, machine, device, encode_, flat, residual, compression, writes=residual,
            accessed=encoding.nbytes, launches=encoding.launches, name=f"{name}.encode.{i}",
            nbytes=compression.nbytes(numel, dtype),
        )  # fmt: skip
        payloads.append(payload)
    totals = []
    for i, device in enumerate(devices):
        total = memory_task(
            graph, machine, device, decoded_sum, payloads, compression, numel, dtype,
            accessed=decoding.nbytes, launches=decoding.launches, name=f"{name}.decode.{i}",
            nbytes=whole,
        )  # fmt: skip
        totals.append(total)
    return totals, tuple(residuals)


def _work(
    compression: Compression, count: int, numel: int, dtype: torch.dtype
) -> tuple[Work, Work]:
    """Return the estimated work of one device: to encode its message, and to add those of all."""
    graph = Graph()
    flat, residual = graph.inputs("flat", "residual")
    payload = graph.add(encode_, flat, residual, compression, name="encode", writes=residual)
    graph.add(decoded_sum, [payload] * count, compression, numel, dtype, name="decode")
    like = torch.empty(numel, dtype=dtype, device="meta")
    work = Costs.estimate(graph, {"flat": like, "residual": like}).work
    return work["encode"], work["decode"]


def encode_(flat: Tensor, residual: Tensor, compression: Compression) -> Tensor:
    """Return the payload of a tensor plus the residual; the error becomes the new residual."""
    residual.add_(flat)
    payload = compression.encode(residual)
    residual.sub_(compression.decode(payload, len(flat), flat.dtype)).nan_to_num_(0.0, 0.0, 0.0)
    return payload


def decoded_sum(
    payloads: Sequence[Tensor], compression: Compression, numel: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the decoded payloads, in their order."""
    total = compression.decode(payloads[0], numel, dtype)
    for payload in payloads[1:]:
        total.add_(compression.decode(payload, numel, dtype))
    return total


def _scale_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for scaling: in half precision, a quotient would be rounded twice."""
    return torch.promote_types(dtype, torch.float32)
