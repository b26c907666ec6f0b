"""Suggest changes, each with the makespan that is predicted with it.

Remedies leave devices and order as they are. Other placements are those of the policies that ``auto``
tries, with and without the devices to which the user bound tasks. A function yields advice, or
returns notes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autosched._lib.text import (
    amount,
    count,
    device_list,
    duration,
    file_name,
    name_list,
    percent,
    spelled,
)
from autosched.costs.costs import Costs, Replay
from autosched.errors import AutoschedError, ScheduleError
from autosched.explanation.what_if import LEAST, SMALL, Advice, Case, fewest
from autosched.graph.graph import Task, Value
from autosched.machine.machine import Device, Link
from autosched.placement import Placement
from autosched.policies import single_on
from autosched.policies.candidates import candidates
from autosched.program.program import Copy, Run, Stream, Wait
from autosched.simulation.simulate import is_pageable, makespan

_PAGEABLE = 0.1  # of the makespan, from which pageable memory is mentioned


# ---- page-locked memory
#
# A caller's host memory may be pageable. Host memory that the runtime allocates is not, since
# ``to("cpu", non_blocking=True)`` returns page-locked memory. So a copy is slow because of the
# caller's tensor that it reads or overwrites.


def _pageable_copies(case: Case, costs: Costs) -> dict[str, Copy]:
    """Return the first copy of each input and constant that is in pageable memory."""
    found: dict[str, Copy] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and is_pageable(copy, replace(case.problem, costs=costs)):
            root = case.graph.value(copy.value).root
            found.setdefault(case.graph.values[root].name, copy)
    return found


def pin_memory(case: Case) -> Iterator[Advice]:
    """Suggest inputs and constants to put into page-locked memory."""
    slow = _pageable_copies(case, case.costs)
    if not slow:
        return
    nbytes = {name: case.costs.value_nbytes(case.graph.value(name)) for name in slow}
    largest = sorted(slow, key=lambda name: -nbytes[name])

    def with_pinned(pinned: Sequence[str]) -> Case:
        pageable = case.costs.pageable.difference(pinned)
        return case.having(costs=replace(case.costs, pageable=pageable))

    pinned, makespan = fewest(largest, case.makespan, lambda some: with_pinned(some).makespan)
    if makespan < (1 - LEAST) * case.makespan:
        makespan = promised(with_pinned(pinned))
    size = amount(sum(nbytes[name] for name in pinned), "B")
    copy = slow[pinned[0]]
    rates = _rates(case.machine.link(copy.source, copy.destination))
    lies, is_ = ("it lies", "is") if len(pinned) == 1 else ("they lie", "are")
    where = f"{lies} in pageable host memory and {is_} copied {rates}"
    words = f"pin {name_list(pinned)} ({size}), by .pin_memory(): {where}"
    yield Advice("pin", words, (), tuple(pinned), makespan)


def pageable_note(case: Case) -> tuple[str, ...]:
    """Note the cost of pageable memory on an emulated machine."""
    if not case.machine.imagined or case.costs.pageable:
        return ()
    sources = {value.name: case.costs.value_nbytes(value) for value in case.graph.sources}
    slower = case.having(costs=replace(case.costs, pageable=frozenset(sources)))
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


# ---- repeated tasks and spilled values


def repeat_note(case: Case) -> tuple[str, ...]:
    """Describe what is repeated because memory is limited."""
    original = case.problem.original
    if original is None:
        return ()
    again = [task for task in case.graph.tasks if task.name not in original.graph.names]
    seconds = sum(
        case.costs.task_seconds(task, case.machine.device(case.placement.device[task.name]))
        for task in again
        if not task.view
    )
    devices = device_list(list(dict.fromkeys(case.placement.device[task.name] for task in again)))
    repeated = count(sum(not task.view for task in again), "task")
    is_ = "is" if repeated.startswith("1 ") else "are"
    return (f"{repeated} {is_} repeated to keep to the memory of {devices}: {duration(seconds)}",)


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


# ---- inputs that stay on accelerators
#
# Inputs that tasks write, and constants, are the same tensors in each run. Only the user knows
# whether other inputs are too: they may be weights or a new batch. Advice about them states that
# condition.


_FEW = 4  # devices, up to which the inputs to keep on each are listed
_SHOWN = 3  # inputs that are named

_Homes = Mapping[str, str]


def keep_inputs(case: Case) -> Iterator[Advice]:
    """Suggest inputs and constants to keep on accelerators.

    Each variant is planned and simulated.
    """
    certain, possible = _constant_sources(case)
    best = case.makespan
    both = [*possible, *certain] if possible else []
    for kind, values in (("keep", certain), ("keep inputs", both)):
        remedies = _kept_remedies(case, kind, values)
        remedy = min(remedies, key=lambda remedy: remedy.makespan, default=None)
        if remedy is not None and best - remedy.makespan > LEAST * case.makespan:
            best = remedy.makespan
            yield remedy


def _constant_sources(case: Case) -> tuple[list[Value], list[Value]]:
    """Return the host sources that stay the same in each run, or may.

    Not all of the latter can be, or each run would compute the same: the smallest is left out.
    """
    certain = list[Value]()
    possible = list[Value]()
    for value in case.graph.sources:
        if case.machine.device(case.problem.homes[value.index]).kind == "cpu":
            stays = case.graph.last_version(value.index) > 0 or value.tensor is not None
            (certain if stays else possible).append(value)
    return certain, _largest(case, possible)[:-1]


def _largest(case: Case, values: Sequence[Value]) -> list[Value]:
    """Return the largest values first; of ties the first input, often the batch, is last."""
    return sorted(values, key=lambda value: (-case.costs.value_nbytes(value), -value.index))


def _kept_remedies(case: Case, kind: str, values: Sequence[Value]) -> Iterator[Advice]:
    """Yield remedies that keep inputs, placed as before or on one accelerator."""
    names = [value.name for value in _largest(case, values)]
    used = _destinations(case, names)
    if used:
        yield _kept_remedy(case, kind, [name for name in names if name in used], used, None)
    for device in _accelerator_kinds(case) if names and len(case.graph) <= SMALL else ():
        yield _kept_remedy(case, kind, names, dict.fromkeys(names, device), device)


def _accelerator_kinds(case: Case) -> list[str]:
    """Return an accelerator of each kind, in the machine's order."""
    first: dict[Device, str] = {}
    bound = {*map(case.problem.constraint, case.bound)}
    for name in case.machine.accelerators:
        device = case.machine.device(name)
        anonymous = replace(device, name=device.kind, physical=None)
        first.setdefault(device if name in bound else anonymous, name)
    return list(first.values())


def _destinations(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the first accelerator to which each input is copied from its home."""
    found: dict[str, str] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and copy.value in names and not copy.overwrite:
            value = case.graph.value(copy.value)
            goes = case.machine.device(copy.destination).kind != "cpu"
            if goes and copy.source == case.problem.homes[value.index]:
                found.setdefault(copy.value, copy.destination)
    return found


def _kept_remedy(
    case: Case, kind: str, names: Sequence[str], homes: _Homes, device: str | None
) -> Advice:
    """Return the effect of keeping the first few inputs there, and all tasks on a ``device``."""

    def kept(moved: Sequence[str]) -> Case:
        changed = case.with_inputs_on({name: homes[name] for name in moved})
        placement = case.placement
        if device is not None:
            placement = single_on(device)(changed.problem)
        return changed.placed(placement)

    def makespan_with(moved: Sequence[str]) -> float:
        try:
            return kept(moved).makespan
        except AutoschedError:  # it does not fit there, or there is no link
            return math.inf

    tries = 16 if len(case.graph) <= SMALL else 1
    inputs, makespan = fewest(names, case.makespan, makespan_with, tries)
    if device is None and makespan < (1 - LEAST) * case.makespan:
        makespan = promised(kept(inputs))
    return Advice(kind, _kept_words(case, kind, inputs, homes), (), tuple(inputs), makespan)


def _kept_words(case: Case, kind: str, inputs: Sequence[str], homes: _Homes) -> str:
    devices = list(dict.fromkeys(homes[name] for name in inputs))
    if len(devices) < _FEW:
        groups = ([name for name in inputs if homes[name] == device] for device in devices)
        pairs = zip(groups, devices, strict=True)
        what = " and ".join(f"{name_list(group)} on {device}" for group, device in pairs)
    else:
        what = f"{name_list(inputs)} where they are used"
    size = amount(sum(case.costs.value_nbytes(case.graph.value(name)) for name in inputs), "B")
    shown = ", ".join(f"{name!r}: {homes[name]!r}" for name in inputs[:_SHOWN])
    more = ", ..." if len(inputs) > _SHOWN else ""
    one = len(inputs) == 1
    if _destinations(case, inputs):
        why = f"{'it travels' if one else 'they travel'} from the host in each run"
    else:
        it = "it" if one else "they"
        why = f"elsewhere than on the host {it} would have to travel in each run"
    same = "it is the same tensor" if one else "they are the same tensors"
    condition = f", if {same} in each run, as weights are" if kind == "keep inputs" else ""
    return f"keep {what} ({size}), by inputs={{{shown}{more}}}{condition}: {why}"


# ---- tasks that take less time than their launch, and busy threads
#
# Merging saves no launches, because a merged task calls its operators one by one. So the advice is
# to fuse kernels or to replay a CUDA graph, for merged tasks too.


def fuse_launches(case: Case) -> Iterator[Advice]:
    """Suggest fusing tasks that take longer to launch than to run.

    Consecutive tasks that are launched as one would pay for one launch. ``asc.merge`` alone does
    not achieve that: the operators of a merged task are launched one by one, and count here like
    consecutive tasks.
    """
    rows = _launch_bound_rows(case)
    saved = {i: launch for row in rows for i, launch in row.items()}
    heads = set(map(min, rows))
    for first in heads:
        saved[first] -= min(saved[first], _device(case, first).launch_seconds)
    if not any(saved.values()):
        return
    faster = [seconds - saved.get(i, 0.0) for i, seconds in enumerate(case.seconds)]
    tiny = [i for row in rows for i in row]
    tasks = [_task(case, i) for i in tiny]
    names = tuple(task.name for task in tasks)
    launch = sum(sum(row.values()) for row in rows)
    whole = sum(case.seconds[i] for i in tiny)
    words = (
        f"{count(len(tasks), 'task')} of about {duration(whole / len(tasks))} "
        f"({name_list(names)}, {file_name(tasks[0].source)}) "
        f"{'costs' if len(tasks) == 1 else 'cost'} more to launch ({duration(launch)}) than to run "
        f"({duration(whole - launch)}): merge kernels into one (torch.compile), "
        "or replay all as a CUDA graph, by asc.schedule(..., replay=True)"
    )
    yield Advice("launch", words, names, (), case.timed(faster, saved.keys() - heads))


def replay_launches(case: Case) -> Iterator[Advice]:
    """Suggest replaying CUDA graphs if threads of the host are busy issuing work."""
    if is_issued_late(case) and case.costs.replay is None:
        replayed = case.having(costs=replace(case.costs, replay=Replay()))
        words = f"{_busy(case)}: replay CUDA graphs, by asc.schedule(..., replay=True)"
        yield Advice("launch", words, (), (), promised(replayed))


def host_note(case: Case) -> tuple[str, ...]:
    """Note that the host bounds the makespan, if it would be shorter with work issued in no time."""
    if not is_issued_late(case):
        return ()
    free = duration(makespan(case.program, case.seconds))
    return (f"the host bounds the run: {_busy(case)}; issued in no time, it would take {free}",)


def is_issued_late(case: Case) -> bool:
    """Return whether issuing work prolongs the run."""
    least = 0.0 if case.issuing is None else makespan(case.program, case.seconds)
    return case.issuing is not None and case.makespan - least > LEAST * case.makespan


def _busy(case: Case) -> str:
    assert case.issuing is not None
    thread = dict(zip(case.program.streams, case.issuing.thread.tolist(), strict=True))
    busy: dict[int, float] = {}
    for instruction, seconds in zip(case.program, case.issuing.seconds.tolist(), strict=True):
        number = thread[instruction.stream]
        busy[number] = busy.get(number, float(case.issuing.begin[0])) + seconds
    return f"one thread is busy for {duration(max(busy.values()))} with issuing work"


def _launch_bound_rows(case: Case) -> list[dict[int, float]]:
    """Return rows of consecutive tiny tasks on a stream: their launch seconds by instruction."""
    rows: list[dict[int, float]] = []
    open_rows: dict[Stream, dict[int, float]] = {}
    for i, instruction in enumerate(case.program):
        if isinstance(instruction, Wait):
            open_rows.pop(instruction.stream, None)
        elif isinstance(instruction, Run) and case.seconds[i]:
            device = _device(case, i)
            launches = case.costs.launches(_task(case, i))
            launch = min(device.launch_seconds * launches, case.seconds[i])
            if not device.is_accelerator or launch <= case.seconds[i] / 2:
                open_rows.pop(instruction.stream, None)
                continue
            if instruction.stream not in open_rows:
                rows.append(open_rows.setdefault(instruction.stream, {}))
            open_rows[instruction.stream][i] = launch
    return [
        row
        for row in rows
        if len(row) > 1 or any(row[i] > _device(case, i).launch_seconds for i in row)
    ]


def _device(case: Case, instruction: int) -> Device:
    return case.machine.device(case.program.instructions[instruction].stream.device)


def _task(case: Case, instruction: int) -> Task:
    run = case.program.instructions[instruction]
    assert isinstance(run, Run)
    return case.graph.task(run.task)


# ---- other placements

_MOST = 20_000  # tasks, up to which there is time to plan again
_FAR = 3  # times the makespan, from which percentages are hard to read
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are still mentioned


@dataclass(frozen=True)
class Plans:
    """Other placements, as ``"auto"`` finds them, the best first: ``bound`` respects bindings.

    ``freed`` ignores bindings to accelerators, ``off_host`` ignores bindings to a CPU of tasks that
    are slow there.
    """

    bound: tuple[Case, ...]
    freed: tuple[Case, ...]
    off_host: tuple[Case, ...]

    @classmethod
    def of(cls, case: Case) -> Plans:
        """Plan with other policies, unless the graph is too large."""
        return cls(
            _plans(case, [case.placement]),
            _plans(case.freed, [case.placement]) if case.bound else (),
            _plans(case.unbound(case.slow_on_host), []) if case.slow_on_host else (),
        )


def promised(case: Case) -> float:
    """Return the makespan of a changed case, as placed, or of the best plan if that is longer.

    Whoever follows advice plans again, and may then get either.
    """
    return max([case.makespan, *(plan.makespan for plan in _plans(case, [])[:1])])


def _plans(case: Case, tried: list[Placement]) -> tuple[Case, ...]:
    """Return the plans of all policies but those ``tried``, the best first; none of large graphs."""
    graph = case.graph
    if len(graph) > _MOST:
        return ()
    plans: list[Case] = []
    confined = case.problem.confined
    for policy in candidates(case.problem):
        try:
            placement = policy(confined)
            if placement not in tried:
                tried.append(placement)
                plan = case.placed(placement)
                _ = plan.makespan  # raises for instructions that the machine cannot execute
                plans.append(plan)
        except ScheduleError:  # another policy may succeed
            continue
    return tuple(sorted(plans, key=lambda plan: plan.makespan))


def change_placement(case: Case, plans: Plans) -> Iterator[Advice]:
    """Suggest other placements, and name the bindings that prevent them."""
    best = case.makespan
    for plan in plans.bound[:1]:
        yield _remedy(case, plan, "policy")
        best = min(best, plan.makespan)
    for plan in plans.off_host[:1]:
        moved = [t for t in case.slow_on_host if plan.placement.device[t.name] in case.workers]
        if plan.makespan < best and moved:
            yield _off_host_remedy(case, plan, moved)
    for plan in plans.freed[:1]:
        if plan.makespan < best:
            free = plan.having(costs=case.costs)
            yield replace(_remedy(case, plan, "bound"), makespan=promised(free))


def _off_host_remedy(case: Case, plan: Case, moved: Sequence[Task]) -> Advice:
    """Suggest releasing tasks that are bound to a CPU and slow there."""
    names = tuple(task.name for task in moved)
    host = case.placement.device[names[0]]
    taken = duration(sum(case.task_seconds(task, host) for task in moved))
    there = device_list(list(dict.fromkeys(plan.placement.device[name] for name in names)))
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    words = (
        f"{name_list(names)} {are} bound to {host} ({file_name(moved[0].source)}), which takes "
        f"{taken} for that; policy='auto' without that puts {them} on {there}"
    )
    return Advice("host bound", words, names, (), plan.makespan)


def _remedy(case: Case, plan: Case, kind: str) -> Advice:
    """Describe what is wrong with the devices of tasks."""
    bound = case.bound if kind == "bound" else ()
    unused = [name for name in plan.used if name not in case.used]
    binding = _binding(case, bound) if bound else ""
    reason = f"{binding}; " if bound else ""
    auto = "policy='auto'" + (" without that" if bound else "")
    if len(plan.used) < len(case.used):
        kind = f"fewer {kind}"
        if len(plan.used) > 1:
            words = f"{device_list(plan.used)} do better than {spelled(len(case.used))}"
        else:
            words = f"{_no_gain(case, plan.makespan)}; {_alone(plan)} takes less"
        words += f", but {binding}" if bound else ""
    elif unused:
        kind = f"idle {kind}"
        stand, them = ("stands", "it") if len(unused) == 1 else ("stand", "them")
        idle = f"{device_list(unused)} could help and {stand} idle"
        words = f"{idle}: {reason}{auto} uses {them}"
    elif plan.placement.device == case.placement.device:
        words = f"tasks could be issued in a better order: {auto} finds one"
    else:
        words = f"{reason or 'tasks could be placed better: '}{auto} finds a faster plan"
    return Advice(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def _binding(case: Case, bound: Sequence[Task]) -> str:
    what = f"{count(len(bound), 'task')} {'is' if len(bound) == 1 else 'are'}"
    if 1 < len(bound) == len(case.graph.tasks):
        what = "all tasks are"
    devices = device_list(list(dict.fromkeys(str(case.problem.constraint(task)) for task in bound)))
    return f"{what} bound to {devices} (at {file_name(bound[0].source)}, or by place=)"


def device_count_note(case: Case, plans: Plans) -> tuple[str, ...]:
    """Describe that more devices, or fewer, would not help."""
    more = [plan for plan in plans.bound if len(plan.used) > len(case.used)]
    fewer = [plan for plan in plans.bound if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan > 0:
        take = "takes" if len(more[0].used) == 1 else "take"
        longer = f"{take} {_longer(more[0].makespan / case.makespan)}"
        devices = device_list(more[0].used)
        return (f"{_no_gain(more[0], case.makespan)} ({devices} {longer})",)
    if fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        return (f"on {_alone(fewer[0])} it takes {duration(fewer[0].makespan)}, hardly longer",)
    return ()


def _longer(ratio: float) -> str:
    if ratio > _FAR:
        return f"{ratio:.0f} times as long"
    return f"{percent(ratio - 1)} longer" if ratio > 1.005 else "as long"


def _no_gain(plan: Case, other: float) -> str:
    """Write that the devices do not help: copies are the reason if it were better without."""
    pairs = zip(plan.program, plan.seconds, strict=True)
    without_copies = plan.timed([0.0 if isinstance(i, Copy) else s for i, s in pairs])
    why = "there is too little to do at once"
    if without_copies < other:
        why = "copies take longer than the compute they save"
    if len(plan.used) == 1:
        return f"using {device_list(plan.used)} gives nothing here: {why}"
    return f"{spelled(len(plan.used))} devices give nothing here: {why}"


def _alone(case: Case) -> str:
    return f"{device_list(case.used) or case.machine.host} alone"
