"""Measure whether streams of an accelerator run concurrently.

Small kernels leave most of a device free for other streams, large ones leave nothing. So the
interference of streams depends on the kernels. One factor per device would be wrong for large
kernels or for small ones; with one factor for each pair of tasks, planning would take more than one
pass, and no lower bound would hold. So a program is simulated with streams that do not slow each
other down, and a device gets as many streams as are worthwhile for small kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from autosched.measurement.cache import MeasurementCache
from autosched.measurement.hardware import model_name
from autosched.measurement.stopwatch import EventWatch, synchronize
from autosched.program.program import Stream
from autosched.runtime.backends.accelerator import pooled

__all__ = ["COUNTS", "sharing", "worthwhile_streams"]

COUNTS = (2, 4, 8)  # streams that are tried
# Times the work per second that more streams must do, to pay for their events and memory.
GAIN = 1.1
_SIZE = 128  # of the square matrices that are multiplied: small ones
_CALLS = 32  # on each stream


def sharing(
    device: torch.device, streams: int, *, cached: MeasurementCache, repeat: int = 5
) -> float:
    """Return how many times longer several streams with the same work take than one.

    1 is fully concurrent; a ratio equal to the number of streams is no gain.
    """
    name = "sharing", model_name(device), str(streams)
    if earlier := cached.get(*name):
        return earlier[0]
    alone, together = (
        statistics.median(_seconds(device, count) for _ in range(repeat + 1))
        for count in (1, streams)
    )
    ratio = together / alone if alone > 0 else float("nan")
    cached.put((ratio, ratio), *name)
    return ratio


def worthwhile_streams(found: Sequence[tuple[int, float]]) -> int:
    """Return how many streams are worthwhile, from ratios of ``sharing`` by their number.

    Each step must gain, and be possible.

    >>> worthwhile_streams([(2, 1.0), (4, 1.5), (8, 3.0)])
    4
    """
    best = 1
    done = 1.0
    for streams, ratio in found:
        if not ratio >= 0.5 or streams / ratio < GAIN * done:
            break
        best = streams
        done = streams / ratio
    return best


def _seconds(device: torch.device, count: int) -> float:
    """Return how long streams take for the same products each."""
    watch = EventWatch(device)
    names = (f"compute{number or ''}" for number in range(count))
    own = [pooled(device, Stream(str(device), name)) for name in names]
    matrices = [torch.ones(_SIZE, _SIZE, device=device) for _ in own]
    products = [torch.empty_like(matrix) for matrix in matrices]
    synchronize(device)

    def fork_and_join() -> None:
        begun = torch.Event(device)
        begun.record(watch.stream)
        for stream in own:
            stream.wait_event(begun)
        for _ in range(_CALLS):
            for stream, matrix, product in zip(own, matrices, products, strict=True):
                torch.accelerator.set_stream(stream)
                torch.mm(matrix, matrix, out=product)
        torch.accelerator.set_stream(watch.stream)
        for stream in own:
            done = torch.Event(device)
            done.record(stream)
            watch.stream.wait_event(done)

    current = torch.accelerator.current_device_index()
    try:
        issued = watch.time([fork_and_join])[0].issued
        return watch.time([fork_and_join], 2 * issued)[0].seconds
    finally:
        torch.accelerator.set_stream(watch.stream)
        torch.accelerator.set_device_index(current)
