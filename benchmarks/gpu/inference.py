"""Networks with branches, batch 1 to 32, inference in float32: what several streams are worth.

All contestants take turns on the same images and begin with the GPU at rest, so this is the latency of one call; each
must give the scores of the eager network, within 1% by the norm. Ours are planned with costs measured on this GPU, for
1, 2, 4 and 8 streams; the fastest of the four in a trial of its own takes part. The literature has streams at 1.41
times (Inception-v3, IOS) to 1.68 times (GoogLeNet, Opara) one stream replayed as a CUDA graph, for one image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from _record import Case, Promise, predicted
from _rig import Rig
from contestants import CONTESTANTS, Entry, close, entered, raced
from networks import NETWORKS, REHEARSED, Kind
from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 50
NO_HARM = 0.98  # of what one stream gives, at the least
ONE_STREAM, STREAMS, REPLAY = "CUDA graph, one stream", "autosched, streams", "autosched, replay"


def cases(rig: Rig) -> dict[str, Callable[[], Case]]:
    """Return a case for each network and batch."""
    kinds = REHEARSED if rig.rehearse else NETWORKS
    batches = (1,) if rig.rehearse else (1, 8) if rig.quick else BATCHES
    return {
        f"{name}, batch {batch}": partial(_case, rig, kind, batch)
        for name, kind in kinds.items()
        for batch in batches
    }


def _case(rig: Rig, kind: Kind, batch: int) -> Case:
    torch.manual_seed(0)
    model = kind.make().eval().to(rig.device)
    x = torch.rand(batch, 3, kind.pixels, kind.pixels, device=rig.device)
    with torch.no_grad():
        makers = {label: partial(make, rig, model, x) for label, make in CONTESTANTS.items()}
        entries, reasons = entered(rig, makers)
        _compare(entries, model(x), reasons)
        seconds = raced(rig, entries, reasons, ROUNDS)
    notes = {
        f"streams, {label}": _streams(entry) for label, entry in entries.items() if entry.schedule
    }
    promises = list(_promises(kind, batch, entries, seconds))
    close(entries)
    return Case(seconds, promises, reasons, notes)


def _compare(entries: dict[str, Entry], wanted: Tensor, reasons: dict[str, str]) -> None:
    """Leave out who computes something else."""
    for name in list(entries):
        found = entries[name].call()
        if not float((found - wanted).norm()) <= 0.01 * float(
            wanted.norm()
        ):  # a NaN is no less either
            del entries[name]
            reasons[name] = "its scores are NOT those of the eager network"


def _promises(
    kind: Kind, batch: int, entries: Mapping[str, Entry], seconds: Mapping[str, float]
) -> Iterator[Promise]:
    least = kind.gain if kind.gain and batch == 1 else NO_HARM
    if ONE_STREAM in seconds and REPLAY in seconds:
        yield Promise("one-stream graph / replay", seconds[ONE_STREAM] / seconds[REPLAY], least)
    if "eager" in seconds and STREAMS in seconds:
        yield Promise("eager / streams", seconds["eager"] / seconds[STREAMS], NO_HARM)
    for name in (STREAMS, REPLAY):
        if name in seconds and (schedule := entries[name].schedule):
            yield predicted(schedule.makespan, seconds[name], name)


def _streams(entry: Entry) -> int:
    assert entry.schedule is not None
    return len(entry.schedule.program.streams)
