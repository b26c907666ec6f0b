"""Remedies for copies: page-locked memory, and more streams for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autosched.explaining.advice import Remedy, fewest
from autosched.explaining.case import Case
from autosched.explaining.causes import Behind
from autosched.explaining.words import amount, duration, names
from autosched.machine import Machine
from autosched.program import Copy, Program, Stream
from autosched.simulate import is_pageable, simulate

__all__ = ["copy_streams", "pin"]


def pin(case: Case) -> Iterator[Remedy]:
    """Say which inputs and constants to put into page-locked memory."""
    slow: dict[str, float] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and is_pageable(copy, case.graph, case.machine, case.costs):
            value = case.graph.values[case.graph.value(copy.value).root]
            slow[value.name] = max(slow.get(value.name, 0.0), case.costs.value_nbytes(value))
    if not slow:
        return
    largest = sorted(slow, key=lambda name: -slow[name])

    def without(pinned: Sequence[str]) -> float:
        return case.priced(dataclasses.replace(case.costs, pageable=case.costs.pageable.difference(pinned))).makespan

    pinned, makespan = fewest(largest, case.makespan, without)
    one, size = len(pinned) == 1, amount(sum(slow[name] for name in pinned))
    lies, copies = ("lies", "its copies are") if one else ("lie", "their copies are")
    words = f"pin {names(pinned)} ({size}): {'it' if one else 'they'} {lies} in pageable host memory, so {copies} slow"
    yield Remedy("pin", words, (), tuple(pinned), makespan)


def copy_streams(case: Case, before: Sequence[Sequence[Behind]]) -> Iterator[Remedy]:
    """Say what copies stand in line for, and what streams of their own would give."""
    lines = _lines(case, before)
    if not lines or not case.machine.contention:
        return
    (stream, waited), *_ = sorted(lines.items(), key=lambda item: -item[1][0])
    seconds, values = waited
    free = Machine(case.machine.devices, case.machine.links, contention=False, imagined=case.machine.imagined)
    apart = case.placed(case.placement, machine=free)
    line = f"copies queue on {stream} for {duration(seconds)} ({names(values)})"
    by_link = simulate(_by_link(apart.program), case.graph, free, case.costs).makespan
    if by_link <= (case.makespan + apart.makespan) / 2:
        yield Remedy("copy streams", f"{line}: give each link a copy stream", (), values, by_link)
    else:
        words = f"{line}: a copy stream for each, if the link carries them side by side, or smaller copies"
        yield Remedy("copy streams", words, (), values, apart.makespan)


def _lines(case: Case, before: Sequence[Sequence[Behind]]) -> dict[Stream, tuple[float, tuple[str, ...]]]:
    """Return for each copy stream how long copies stood in line, and those that did, the longest wait first."""
    spans = case.predicted.spans
    waits: dict[Stream, dict[str, float]] = {}
    for span, some in zip(spans, before, strict=True):
        if span.kind == "copy":
            ready = max((spans[b.span].end for b in some if b.needed), default=0.0)
            ahead = max(((spans[b.span].end, b.span) for b in some if not b.needed), default=(0.0, -1))
            if ahead[0] > ready:
                stream = next(s for s in span.streams if s in spans[ahead[1]].streams)
                line = waits.setdefault(stream, {})
                line[span.name] = line.get(span.name, 0.0) + ahead[0] - ready
    return {
        stream: (sum(line.values()), tuple(sorted(line, key=lambda name: -line[name])))
        for stream, line in waits.items()
    }


def _by_link(program: Program) -> Program:
    """Return a program whose copies have a stream each with all copies of one source and destination on one."""
    streams = {
        copy.stream: Stream(copy.source, f"copies to {copy.destination}") for copy in program if isinstance(copy, Copy)
    }
    moved = [dataclasses.replace(i, stream=streams.get(i.stream, i.stream)) for i in program]
    return Program(tuple(moved), program.inputs, program.outputs)
