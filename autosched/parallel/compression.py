"""All-reduce with compressed gradients and error feedback.

The rounding error of a message, the residual, stays on its device and is added to the next message
(Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD", ICML 2019). So over all steps, the applied updates plus the residuals are
the sum of the gradients, up to rounding. Each device receives the messages of all others (an
all-gather), decodes all of them, and adds them in the order of the devices, so all devices get the
same bits. That is n - 1 messages into each device, where a ring transfers 2 (n - 1) / n of the
whole: half precision saves nothing with 4 devices or more.

A NaN or an infinity appears in the total, but not in the residual. An element beyond the range of a
half-precision format becomes infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autosched import Graph, Machine, ScheduleError, Value
from autosched.parallel.costs import memory_task

__all__ = ["Compression", "Half", "Int8", "Passes", "TopK", "compressed_all_reduce"]


class Passes(NamedTuple):
    """The memory accesses of a function, in whole tensors, and its number of kernel launches."""

    accesses: float
    launches: int


class Compression(Protocol):
    """How a flat tensor is encoded as a payload, one tensor, and how a payload is decoded."""

    def encode(self, flat: Tensor) -> Tensor:
        """Return the payload of a 1-D tensor, in newly allocated memory."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded 1-D tensor, in newly allocated memory."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the size of a payload."""

    def passes(self) -> tuple[Passes, Passes]:
        """Return the cost of encoding and decoding, for estimates."""


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

    def passes(self) -> tuple[Passes, Passes]:
        """Return one operator each way."""
        return Passes(1.5, 1), Passes(1.5, 1)


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

    def passes(self) -> tuple[Passes, Passes]:
        """Return the passes of all operators for encoding and decoding."""
        # Absolute value, largest, quotient, rounding, narrowing, joining; widening, product.
        return Passes(9, 8), Passes(3.25, 2)


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

    def passes(self) -> tuple[Passes, Passes]:
        """Return the passes of all operators for encoding and decoding."""
        # Absolute value, selection by radix, gathering, joining; zeros, scattering.
        return Passes(6 + 10 * self.share, 6), Passes(1 + 9 * self.share, 4)


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
    encoding, decoding = compression.passes()
    whole = numel * dtype.itemsize
    payloads = []
    residuals = []
    for i, (flat, device) in enumerate(zip(flats, devices, strict=True)):
        with graph.on(device):
            residual = graph.input(f"{name}.residual.{i}", nbytes=whole)
        residuals.append(residual.name)
        accesses = encoding.accesses + decoding.accesses + 8
        launches = encoding.launches + decoding.launches + 3
        payload = memory_task(
            graph, machine, device, encode_, flat, residual, compression, writes=residual,
            accessed=accesses * whole, launches=launches, name=f"{name}.encode.{i}",
            nbytes=compression.nbytes(numel, dtype),
        )  # fmt: skip
        payloads.append(payload)
    n = len(flats)
    accesses = n * decoding.accesses + 3 * (n - 1)
    launches = n * decoding.launches + n - 1
    totals = []
    for i, device in enumerate(devices):
        total = memory_task(
            graph, machine, device, decoded_sum, payloads, compression, numel, dtype,
            accessed=accesses * whole, launches=launches, name=f"{name}.decode.{i}", nbytes=whole,
        )  # fmt: skip
        totals.append(total)
    return totals, tuple(residuals)


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
