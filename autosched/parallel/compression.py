"""Sum gradients over devices with compressed messages and error feedback.

Adds to a graph the sum of one flat tensor per device. What a device does not send in this step it
keeps, and adds to what it sends in the next step (Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019). So over
all steps, what was applied plus what is still kept is the sum of the gradients, up to rounding.
Each device receives the messages of all others, decodes all of them, and adds them in the order of
the devices, so all devices get the same bits. That is n - 1 messages into each device, where a ring
transfers 2 (n - 1) / n of the whole: half precision saves nothing with 4 devices or more.

A NaN or an infinity is never hidden: it appears in the total. A device does not keep it for the
next step. An element beyond the range of a half-precision format becomes infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autosched import Graph, Machine, ScheduleError, Value
from autosched.parallel.traffic import memory_seconds

__all__ = ["Compression", "Half", "Int8", "Passes", "TopK", "exchange"]


class Passes(NamedTuple):
    """How often a function reads or writes the whole tensor, and how many operators it launches."""

    accesses: float
    launches: int


class Compression(Protocol):
    """How a flat tensor is encoded as a payload, one tensor, and how a payload is decoded."""

    def encode(self, flat: Tensor) -> Tensor:
        """Return the payload of a 1-D tensor, in newly allocated memory."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor near the encoded one, in newly allocated memory."""

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
    """Send each element as one of 255 multiples of a scale, which is the largest absolute value / 127.

    One byte per element and the scale. Each element is off by at most half the scale, and by
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
        """Return the passes of all operators for encoding and decoding.

        Encoding: absolute value, largest, quotient, rounding, narrowing, joining. Decoding:
        widening, product.
        """
        return Passes(9, 8), Passes(3.25, 2)


@dataclass(frozen=True)
class TopK:
    """Send the share of the elements that is largest in absolute value, rounded up, as values and int32 positions.

    The k of d elements that are sent have at least k/d of the sum of squares (Stich et al.,
    "Sparsified SGD with memory", NeurIPS 2018). Raises ScheduleError unless the share is above 0
    and at most 1.

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
        """Return how many of this many elements are sent."""
        return min(numel, math.ceil(self.share * numel))

    def encode(self, flat: Tensor) -> Tensor:
        """Return the values' bytes, then those of their positions."""
        _, positions = torch.topk(
            flat.abs(), self.count(len(flat)), sorted=False
        )  # NaN counts as largest
        return torch.cat(
            [flat[positions].view(torch.uint8), positions.to(torch.int32).view(torch.uint8)]
        )

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Put the values into zeros."""
        split = self.count(numel) * dtype.itemsize
        values = payload[:split].view(dtype)  # aligned
        positions = payload[split:].clone().view(torch.int32)
        return values.new_zeros(numel).index_copy_(0, positions.long(), values)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the value's bytes and 4 for each element that is sent."""
        return self.count(numel) * (dtype.itemsize + torch.int32.itemsize)

    def passes(self) -> tuple[Passes, Passes]:
        """Return the passes of all operators for encoding and decoding.

        Encoding: absolute value, selection by radix, gathering, joining. Decoding: zeros,
        scattering.
        """
        return Passes(6 + 10 * self.share, 6), Passes(1 + 9 * self.share, 4)


def exchange(
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
    """Sum flat values, one on each device, by payloads.

    Return the total of each device, and names of inputs.

    ``flats`` are 1-D, of ``numel`` elements of ``dtype``. The inputs, one per device, hold the
    residual of that device: pass ``torch.zeros(numel, dtype=dtype)`` at the start, and the same
    tensors in later runs; steps write them. One device, or an empty tensor, sends nothing and needs
    no input. Names begin with ``name``. Raises ScheduleError for more elements than an int32 can
    count.

    >>> graph, machine = Graph(), Machine.emulated(gpus=2)
    >>> a, b = graph.inputs("a", "b")
    >>> _, kept = exchange(graph, [a, b], machine.accelerators, Int8(), machine=machine, numel=8, dtype=torch.float32,
    ...                    name="bucket")
    >>> kept
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
    n = len(flats)
    payloads = []
    kept = []
    for i, (flat, device) in enumerate(zip(flats, devices, strict=True)):
        with graph.on(device):
            residual = graph.input(f"{name}.residual.{i}", nbytes=whole)
            accesses = encoding.accesses + decoding.accesses + 8
            launches = encoding.launches + decoding.launches + 3
            payloads.append(graph.add(
                encode_, flat, residual, compression, writes=residual, name=f"{name}.encode.{i}",
                seconds=memory_seconds(machine, device, accesses * whole, launches),
                nbytes=compression.nbytes(numel, dtype),
            ))  # fmt: skip
        kept.append(residual.name)
    accesses = n * decoding.accesses + 3 * (n - 1)
    launches = n * decoding.launches + n - 1
    totals = [
        graph.add(
            decoded_sum, payloads, compression, numel, dtype, on=device, name=f"{name}.decode.{i}",
            seconds=memory_seconds(machine, device, accesses * whole, launches), nbytes=whole,
        )
        for i, device in enumerate(devices)
    ]  # fmt: skip
    return totals, tuple(kept)


def encode_(flat: Tensor, residual: Tensor, compression: Compression) -> Tensor:
    """Return the payload of a tensor plus the residual.

    Store in place, as the new residual, what the payload omits.
    """
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
    """Return the format in which elements are scaled: of half precision, a quotient would be rounded twice."""
    return torch.promote_types(dtype, torch.float32)
