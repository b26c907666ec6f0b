"""Suggest page-locked memory and more streams for copies.

A caller's host memory may be pageable. Host memory that the runtime allocates is not, since
``to("cpu", non_blocking=True)`` returns page-locked memory. So a copy is slow because of the
caller's tensor that it reads or overwrites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autosched._lib.text_table import amount
from autosched.explanation.advice import Remedy, fewest
from autosched.explanation.case import Case
from autosched.explanation.causes import Behind
from autosched.explanation.words import count, names
from autosched.graph.graph import Use
from autosched.machine.machine import Link, Machine
from autosched.program.program import Copy, Program, Stream
from autosched.simulation.simulate import is_pageable, makespan
from autosched.timeline.timeline import Span
from autosched.viz.paint import duration

__all__ = ["copy_streams", "pageable_note", "pin"]

_PAGEABLE = 0.1  # of the makespan, from which pageable memory is mentioned
_MOST = 4_000  # copies, each with a stream of its own at first: lowering takes long for more


def pin(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to put into page-locked memory."""
    slow: dict[str, tuple[float, Link | None]] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and is_pageable(copy, case.graph, case.machine, case.costs):
            value = case.graph.values[case.graph.value(copy.value).root]
            slow.setdefault(
                value.name,
                (case.costs.value_nbytes(value), case.machine.link(copy.source, copy.destination)),
            )
    if not slow:
        return
    largest = sorted(slow, key=lambda name: -slow[name][0])

    def without(pinned: Sequence[str]) -> float:
        return case.priced(
            dataclasses.replace(case.costs, pageable=case.costs.pageable.difference(pinned))
        ).makespan

    pinned, found = fewest(largest, case.makespan, without)
    one = len(pinned) == 1
    size = amount(sum(slow[name][0] for name in pinned), "B")
    link = slow[pinned[0]][1]
    lies = (
        "it lies in pageable host memory and is"
        if one
        else "they lie in pageable host memory and are"
    )
    words = f"pin {names(pinned)} ({size}), by .pin_memory(): {lies} copied {_rates(link)}"
    yield Remedy("pin", words, (), tuple(pinned), found)


def pageable_note(case: Case) -> tuple[str, ...]:
    """Note the cost of pageable host memory on an emulated machine whose costs ignore it."""
    if not case.machine.imagined or case.costs.pageable:
        return ()
    sources = {value.name: case.costs.value_nbytes(value) for value in case.graph.sources}
    slower = case.priced(dataclasses.replace(case.costs, pageable=frozenset(sources)))
    most = {
        case.graph.values[case.graph.value(copy.value).root].name
        for copy in case.program
        if isinstance(copy, Copy) and is_pageable(copy, case.graph, case.machine, slower.costs)
    }
    if slower.makespan <= (1 + _PAGEABLE) * case.makespan:
        return ()
    largest = sorted((name for name in sources if name in most), key=lambda name: -sources[name])
    return (
        f"host memory is taken to be page-locked; if {names(largest)} were not, the run would take "
        f"{duration(slower.makespan)}: costs.override(pageable=[...]) tells of it",
    )


def _rates(link: Link | None) -> str:
    """Write the rate of a link for pageable memory, and its full rate."""
    if link is None or link.pageable_bytes_per_second is None:
        return "as fast as any other"
    return f"at {amount(link.pageable_bytes_per_second, 'B/s')} instead of {amount(link.bytes_per_second, 'B/s')}"


def copy_streams(case: Case, before: Sequence[Sequence[Behind]]) -> Iterator[Remedy]:
    """Suggest a copy stream for each link, if copies are queued.

    Copies over the same link share its rate, so a stream for each copy is never suggested.
    """
    lines = _lines(case, before)
    if (
        not lines
        or not case.machine.contention
        or sum(isinstance(i, Copy) for i in case.program) > _MOST
    ):
        return
    stream, waits = max(lines.items(), key=lambda item: sum(item[1].values()))
    values = tuple(sorted(waits, key=lambda name: -waits[name]))
    free = Machine(
        case.machine.devices, case.machine.links, contention=False, imagined=case.machine.imagined
    )
    apart = case.placed(case.placement, free)
    stand = "stands" if len(values) == 1 else "stand"
    longest = duration(waits[values[0]])
    line = f"{count(len(values), 'copy')} {stand} in line on {stream}, for up to {longest} ({names(values)})"
    by_link = makespan(_by_link(apart.program), apart.seconds)
    words = (
        f"{line}: a copy stream for each link lets copies by different links go at once, where these are independent "
        "(by hand, in schedule.code)"
    )
    yield Remedy("copy streams", words, (), values, by_link)


def _lines(case: Case, before: Sequence[Sequence[Behind]]) -> dict[Stream, dict[str, float]]:
    """Return for each copy stream the copies that were queued there, and how long."""
    spans = case.predicted.spans
    ended = {span.name: span.end for span in spans if span.kind == "run"}
    waits: dict[Stream, dict[str, float]] = {}
    for span, some in zip(spans, before, strict=True):
        if span.kind == "copy":
            # An earlier copy may already have waited for the producer, so no arrow leads to this
            # one.
            made = ended.get(_maker(case, span.instruction), 0.0)
            ready = max([made, *(spans[b.span].end for b in some if b.needed)])
            others = [
                b.span
                for b in some
                if b.cause == "link" or (b.cause == "batch" and not _one_link(case, span, b))
            ]
            ahead = max(((spans[other].end, other) for other in others), default=(0.0, -1))
            if ahead[0] > ready:
                stream = next(s for s in span.streams if s in spans[ahead[1]].streams)
                line = waits.setdefault(stream, {})
                line[span.name] = max(line.get(span.name, 0.0), ahead[0] - ready)
    return waits


def _one_link(case: Case, span: Span, behind: Behind) -> bool:
    """Whether a copy and its predecessor leave one device, so concurrency gains nothing."""
    ours = case.program.instructions[span.instruction]
    theirs = case.program.instructions[case.predicted.spans[behind.span].instruction]
    return isinstance(ours, Copy) and isinstance(theirs, Copy) and ours.source == theirs.source


def _maker(case: Case, instruction: int) -> str:
    """Return the task that produces what is copied; None for sources."""
    copy = case.program.instructions[instruction]
    assert isinstance(copy, Copy)
    maker = case.graph.maker(Use(case.graph.value(copy.value).index, copy.version))
    return "" if maker is None else case.graph.tasks[maker].name


def _by_link(program: Program) -> Program:
    """Return a program with one copy stream for each pair of source and destination."""
    streams = {
        copy.stream: Stream(copy.source, f"copies to {copy.destination}")
        for copy in program
        if isinstance(copy, Copy)
    }
    moved = [dataclasses.replace(i, stream=streams.get(i.stream, i.stream)) for i in program]
    return Program(tuple(moved), program.inputs, program.outputs)
