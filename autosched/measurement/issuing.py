"""Measure for how long a thread is busy issuing work to an accelerator.

Measured are the calls of torch alone: what a run adds to each instruction is far less. Tasks differ
in the number of operators and in what these check, so ``bench`` measures each of them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from autosched.measurement.cache import MeasurementCache
from autosched.measurement.hardware import model_name
from autosched.measurement.stopwatch import Call, EventWatch, synchronize

__all__ = ["issuing_seconds"]

_CALLS = 64  # in a row: fewer than an accelerator's queue holds, so that the thread never waits
_REPEAT = 9


def issuing_seconds(
    device: torch.device, *, cached: MeasurementCache | None = None
) -> tuple[float, float]:
    """Return the seconds to issue an operator, and to issue a record or a wait."""
    cached = cached or MeasurementCache(None)
    name = "issuing", model_name(device)
    found = cached.get(*name) or _measured(device)
    cached.put(found, *name)
    return found


def _measured(device: torch.device) -> tuple[float, float]:
    watch = EventWatch(device)
    x = torch.zeros(1, device=device)
    event = torch.Event(device)
    operator = [partial(torch.neg, x)] * _CALLS
    both: list[Call] = [
        partial(event.record, watch.stream),
        partial(watch.stream.wait_event, event),
    ]
    return _least(watch, operator), _least(watch, both * (_CALLS // 2))


def _least(watch: EventWatch, calls: Sequence[Call]) -> float:
    found = []
    for _ in range(_REPEAT):
        found.append(watch.time(calls)[0].issued)
        synchronize(watch.device)
    return min(found)
