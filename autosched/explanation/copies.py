"""Suggest page-locked memory and copy streams; note spilled values.

A caller's host memory may be pageable. Host memory that the runtime allocates is not, since
``to("cpu", non_blocking=True)`` returns page-locked memory. So a copy is slow because of the
caller's tensor that it reads or overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosched._lib.text import amount, count, device_list, duration, name_list
from autosched.costs.costs import Costs
from autosched.explanation.advice import LEAST, Remedy, fewest
from autosched.explanation.case import Case
from autosched.explanation.causes import Predecessor
from autosched.explanation.placements import promised
from autosched.machine.machine import Link, Machine
from autosched.program.program import Copy, Program, Stream
from autosched.simulation.simulate import is_pageable

__all__ = ["add_copy_streams", "pageable_note", "pin_memory", "reloads", "spill_note"]

_PAGEABLE = 0.1  # of the makespan, from which pageable memory is mentioned
_MOST = 4_000  # copies, each with a stream of its own at first: lowering takes long for more


def _pageable_copies(case: Case, costs: Costs) -> dict[str, Copy]:
    """Return the first copy of each input and constant that is in pageable memory."""
    found: dict[str, Copy] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and is_pageable(copy, case.graph, case.machine, costs):
            root = case.graph.value(copy.value).root
            found.setdefault(case.graph.values[root].name, copy)
    return found


def pin_memory(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to put into page-locked memory."""
    slow = _pageable_copies(case, case.costs)
    if not slow:
        return
    nbytes = {name: case.costs.value_nbytes(case.graph.value(name)) for name in slow}
    largest = sorted(slow, key=lambda name: -nbytes[name])

    def with_pinned(pinned: Sequence[str]) -> Case:
        pageable = case.costs.pageable.difference(pinned)
        return case.with_costs(replace(case.costs, pageable=pageable))

    pinned, makespan = fewest(largest, case.makespan, lambda some: with_pinned(some).makespan)
    if makespan < (1 - LEAST) * case.makespan:
        makespan = promised(with_pinned(pinned))
    size = amount(sum(nbytes[name] for name in pinned), "B")
    copy = slow[pinned[0]]
    rates = _rates(case.machine.link(copy.source, copy.destination))
    lies, is_ = ("it lies", "is") if len(pinned) == 1 else ("they lie", "are")
    where = f"{lies} in pageable host memory and {is_} copied {rates}"
    words = f"pin {name_list(pinned)} ({size}), by .pin_memory(): {where}"
    yield Remedy("pin", words, (), tuple(pinned), makespan)


def pageable_note(case: Case) -> tuple[str, ...]:
    """Note the cost of pageable memory on an emulated machine."""
    if not case.machine.imagined or case.costs.pageable:
        return ()
    sources = {value.name: case.costs.value_nbytes(value) for value in case.graph.sources}
    slower = case.with_costs(replace(case.costs, pageable=frozenset(sources)))
    copied = _pageable_copies(case, slower.costs)
    if slower.makespan <= (1 + _PAGEABLE) * case.makespan:
        return ()
    largest = sorted((name for name in sources if name in copied), key=lambda name: -sources[name])
    return (
        f"host memory is taken to be page-locked; if {name_list(largest)} were not, the run would "
        f"take {duration(slower.makespan)}: costs.override(pageable=[...]) tells of it",
    )


def _rates(link: Link | None) -> str:
    """Write the rate of a link for pageable memory, and its full rate."""
    if link is None or link.pageable_bytes_per_second is None:
        return "as fast as any other"
    slow = amount(link.pageable_bytes_per_second, "B/s")
    return f"at {slow} instead of {amount(link.bytes_per_second, 'B/s')}"


# ---- copy streams


def add_copy_streams(case: Case, before: Sequence[Sequence[Predecessor]]) -> Iterator[Remedy]:
    """Suggest a copy stream for each link, if copies are queued.

    Copies over the same link share its rate, so a stream for each copy is never suggested.
    """
    queues = _queued_copies(case, before)
    copies = sum(isinstance(i, Copy) for i in case.program)
    if not queues or not case.machine.contention or copies > _MOST or case.machine.ranks:
        return
    stream, waits = max(queues.items(), key=lambda item: sum(item[1].values()))
    values = tuple(sorted(waits, key=lambda name: -waits[name]))
    imagined = case.machine.imagined
    free = Machine(
        case.machine.devices,
        case.machine.links,
        contention=False,
        imagined=imagined,
        network=case.machine.network,
    )
    apart = case.placed(case.placement, free)
    words = (
        f"{count(len(values), 'copy')} {'stands' if len(values) == 1 else 'stand'} in line on "
        f"{stream}, for up to {duration(waits[values[0]])} ({name_list(values)}): a copy stream "
        "for each link lets copies by different links go at once, where these are independent "
        "(by hand, in schedule.code)"
    )
    by_link = replace(apart, program=_with_streams_by_link(apart.program)).makespan
    yield Remedy("copy streams", words, (), values, by_link)


def _queued_copies(
    case: Case, before: Sequence[Sequence[Predecessor]]
) -> dict[Stream, dict[str, float]]:
    """Return for each copy stream the copies that were queued there, and how long."""
    spans = case.predicted.spans
    ended = {span.name: span.end for span in spans if span.kind == "run"}
    waits: dict[Stream, dict[str, float]] = {}
    for span, some in zip(spans, before, strict=True):
        copy = case.program.instructions[span.instruction]
        if not isinstance(copy, Copy):
            continue
        # An earlier copy may have waited for the producer already; then no arrow leads to this one.
        made = ended.get(case.maker(copy) or "", 0.0)
        ready = max([made, *(spans[b.span].end for b in some if b.needed)])
        ahead = [b.span for b in some if _is_queued_after(case, copy, b)]
        last = max(ahead, key=lambda other: (spans[other].end, other), default=None)
        if last is not None and spans[last].end > ready:
            stream = next(s for s in span.streams if s in spans[last].streams)
            queue = waits.setdefault(stream, {})
            queue[span.name] = max(queue.get(span.name, 0.0), spans[last].end - ready)
    return waits


def _is_queued_after(case: Case, copy: Copy, before: Predecessor) -> bool:
    """Whether a copy waits for one on another link."""
    if before.cause != "batch":
        return before.cause == "link"
    other = case.program.instructions[case.predicted.spans[before.span].instruction]
    return not (isinstance(other, Copy) and other.source == copy.source)


def _with_streams_by_link(program: Program) -> Program:
    """Return a program with one copy stream for each pair of source and destination."""
    streams = {
        copy.stream: Stream(copy.stream.device, f"copies {copy.source} to {copy.destination}")
        for copy in program
        if isinstance(copy, Copy)
    }
    moved = [replace(i, stream=streams.get(i.stream, i.stream)) for i in program]
    return replace(program, instructions=tuple(moved))


# ---- spilled values


def reloads(case: Case) -> Iterator[Copy]:
    """Yield the copies that reload a value to a device where it was before."""
    seen: set[tuple[str, int, str]] = set()
    for copy in case.program:
        if isinstance(copy, Copy) and not copy.overwrite:
            arrival = copy.value, copy.version, copy.destination
            maker = case.maker(copy)
            made = None if maker is None else case.placement.device[maker]
            if arrival in seen or made == copy.destination:
                yield copy
            seen.add(arrival)


def spill_note(case: Case) -> tuple[str, ...]:
    """Describe what had to be spilled and reloaded because memory is limited."""
    found = list(reloads(case))
    if not found:
        return ()
    size = sum(case.costs.value_nbytes(case.graph.value(copy.value)) for copy in found)
    devices = device_list(list(dict.fromkeys(copy.destination for copy in found)))
    values = name_list(list(dict.fromkeys(copy.value for copy in found)))
    brings = "brings" if len(found) == 1 else "bring"
    again = f"{count(len(found), 'copy')} {brings} back {values} ({amount(size, 'B')})"
    return (f"the memory of {devices} does not hold all at once: {again}",)
