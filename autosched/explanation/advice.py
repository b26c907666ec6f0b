"""Suggest changes, each with the makespan that is predicted with it.

Remedies leave devices and order as they are. Other placements are those of the policies that ``auto``
tries, with and without the devices to which the user bound tasks. A function yields advice with the
case that it leads to, or yields notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

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
from autosched.explanation.what_if import LEAST, SMALL, Advice, Case
from autosched.graph.graph import Task
from autosched.placement import Placement
from autosched.policies import single_on
from autosched.policies.candidates import candidates, one_of_each
from autosched.program.program import Copy, Run, Stream, Wait
from autosched.simulation.simulate import is_pageable, makespan

# What would be so after a change; None where nothing needs to be planned anew.
Remedy = tuple[Advice, Case | None]

_PAGEABLE = 0.1  # of the makespan, from which pageable memory is mentioned
_MOST_GAIN = 0.9  # of the gain of all changes, with which the first few suffice


def worthwhile(case: Case, remedies: Iterator[Remedy]) -> tuple[Advice, ...]:
    """Return the advice that pays, with its gain, the largest first.

    Whoever follows advice plans again, and may then get another plan: it promises no less than the
    better of the changed case and the best plan for that.

    Changes of a distribution over devices that the user chose come last, and so do those that depend
    on a condition.
    """
    whole = case.makespan
    least = LEAST * whole
    found = []
    for advice, changed in remedies:
        then = advice.makespan
        if changed is not None and whole - then > least:
            then = max([then, *(plan.makespan for plan in plans_of(changed)[:1])])
        gain = whole - then
        if gain > least:
            found.append(replace(advice, makespan=then, gain=gain, share=gain / whole))
    last = ("bound", "fewer bound", "keep inputs")
    return tuple(sorted(found, key=lambda advice: (advice.kind in last, -advice.gain)))


def _fewest(
    case: Case, items: Sequence[str], change: Callable[[Sequence[str]], Case]
) -> tuple[Sequence[str], Case, float]:
    """Return the first few items that gain nearly as much as all of them, with their change."""

    def changed(some: Sequence[str]) -> tuple[Sequence[str], Case, float]:
        try:
            then = change(some)
            return some, then, then.makespan
        except AutoschedError:  # it does not fit there, or there is no link
            return some, case, math.inf

    found = changed(items)
    number = 1
    while number < len(items) and (number == 1 or len(case.graph) <= SMALL):
        few = changed(items[:number])
        if case.makespan - few[2] >= _MOST_GAIN * (case.makespan - found[2]):
            return few
        number *= 2
    return found


# ---- page-locked memory
#
# A caller's host memory may be pageable. Host memory that the runtime allocates is not, since
# ``to("cpu", non_blocking=True)`` returns page-locked memory. So a copy is slow because of the
# caller's tensor that it reads or overwrites.


def _pageable_copies(case: Case, costs: Costs) -> dict[str, Copy]:
    """Return the first copy of each input and constant that is in pageable memory, largest first."""
    found: dict[str, Copy] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and is_pageable(copy, replace(case.problem, costs=costs)):
            root = case.graph.value(copy.value).root
            found.setdefault(case.graph.values[root].name, copy)
    return {name: found[name] for name in sorted(found, key=lambda name: -_nbytes(case, [name]))}


def _nbytes(case: Case, names: Sequence[str]) -> float:
    return sum(case.costs.value_nbytes(case.graph.value(name)) for name in names)


def pin_memory(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to put into page-locked memory."""

    def with_pinned(pinned: Sequence[str]) -> Case:
        pageable = case.costs.pageable.difference(pinned)
        return case.having(costs=replace(case.costs, pageable=pageable))

    if slow := _pageable_copies(case, case.costs):
        pinned, changed, makespan = _fewest(case, [*slow], with_pinned)
        copy = slow[pinned[0]]
        link = case.machine.link(copy.source, copy.destination)
        rates = "as fast as any other"
        if link is not None and (slower := link.pageable_bytes_per_second) is not None:
            rates = f"at {amount(slower, 'B/s')} instead of {amount(link.bytes_per_second, 'B/s')}"
        lies, is_ = ("it lies", "is") if len(pinned) == 1 else ("they lie", "are")
        where = f"{lies} in pageable host memory and {is_} copied {rates}"
        size = amount(_nbytes(case, pinned), "B")
        words = f"pin {name_list(pinned)} ({size}), by .pin_memory(): {where}"
        yield Advice("pin", words, (), tuple(pinned), makespan), changed


def pageable_note(case: Case) -> Iterator[str]:
    """Note the cost of pageable memory on an emulated machine."""
    if case.machine.imagined and not case.costs.pageable:
        names = frozenset(value.name for value in case.graph.sources)
        slower = case.having(costs=replace(case.costs, pageable=names))
        if slower.makespan > (1 + _PAGEABLE) * case.makespan:
            largest = name_list([*_pageable_copies(case, slower.costs)])
            yield (
                f"host memory is taken to be page-locked; if {largest} were not, the run would take "
                f"{duration(slower.makespan)}: costs.override(pageable=[...]) tells of it"
            )


# ---- repeated tasks and spilled values


def repeat_note(case: Case) -> Iterator[str]:
    """Describe what is repeated because memory is limited."""
    if (original := case.problem.original) is not None:
        again = [task for task in case.graph.tasks if task.name not in original.graph.names]
        device = case.placement.device
        seconds = sum(case.task_seconds(t, device[t.name]) for t in again if not t.view)
        devices = device_list(list(dict.fromkeys(device[task.name] for task in again)))
        repeated = count(sum(not task.view for task in again), "task")
        is_ = "is" if repeated.startswith("1 ") else "are"
        yield f"{repeated} {is_} repeated to keep to the memory of {devices}: {duration(seconds)}"


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


def spill_note(case: Case) -> Iterator[str]:
    """Describe what had to be spilled and reloaded because memory is limited."""
    if found := list(reloads(case)):
        size = amount(_nbytes(case, [copy.value for copy in found]), "B")
        devices = device_list(list(dict.fromkeys(copy.destination for copy in found)))
        values = name_list(list(dict.fromkeys(copy.value for copy in found)))
        brings = "brings" if len(found) == 1 else "bring"
        again = f"{count(len(found), 'copy')} {brings} back {values} ({size})"
        yield f"the memory of {devices} does not hold all at once: {again}"


# ---- inputs that stay on accelerators
#
# Inputs that tasks write, and constants, are the same tensors in each run. Only the user knows
# whether other inputs are too: they may be weights or a new batch. Advice about them states that
# condition.


_FEW = 4  # devices, up to which the inputs to keep on each are listed
_SHOWN = 3  # inputs that are named


def keep_inputs(case: Case) -> Iterator[Remedy]:
    """Suggest inputs and constants to keep on accelerators.

    Each variant is planned and simulated. Not all inputs can be the same in each run, or each would
    compute the same: the smallest that no task writes is left out; of ties the first, often the
    batch.
    """
    certain = list[str]()
    possible = list[str]()
    for value in sorted(case.graph.sources, key=lambda v: (-case.costs.value_nbytes(v), -v.index)):
        if case.machine.device(case.problem.homes[value.index]).kind == "cpu":
            stays = case.graph.last_version(value.index) > 0 or value.tensor is not None
            (certain if stays else possible).append(value.name)
    both = [*possible[:-1], *certain] if len(possible) > 1 else []
    both.sort(key=lambda name: (-_nbytes(case, [name]), -case.graph.value(name).index))
    best = case.makespan
    for kind, names in (("keep", certain), ("keep inputs", both)):
        found = min(_kept(case, kind, names), key=lambda kept: kept[0].makespan, default=None)
        if found is not None and best - found[0].makespan > LEAST * case.makespan:
            best = found[0].makespan
            yield found


def _kept(case: Case, kind: str, names: Sequence[str]) -> Iterator[Remedy]:
    """Yield remedies that keep inputs, placed as before or on one accelerator."""
    used = _destinations(case, names)
    ways: list[tuple[Mapping[str, str], str | None]] = [(used, None)] if used else []
    if names and len(case.graph) <= SMALL:
        devices = one_of_each(case.problem, case.machine.accelerators)
        ways += [(dict.fromkeys(names, device), device) for device in devices]
    for homes, device in ways:

        def kept(
            moved: Sequence[str], homes: Mapping[str, str] = homes, device: str | None = device
        ) -> Case:
            changed = case.with_inputs_on({name: homes[name] for name in moved})
            alone = None if device is None else single_on(device)(changed.problem)
            return changed.placed(alone or case.placement)

        inputs, changed, makespan = _fewest(case, [n for n in names if n in homes], kept)
        words = _kept_words(case, kind, inputs, homes)
        yield Advice(kind, words, (), tuple(inputs), makespan), changed


def _destinations(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the first accelerator to which each input is copied from its home."""
    found: dict[str, str] = {}
    for copy in case.program:
        if isinstance(copy, Copy) and copy.value in names and not copy.overwrite:
            goes = case.machine.device(copy.destination).kind != "cpu"
            if goes and copy.source == case.problem.homes[case.graph.value(copy.value).index]:
                found.setdefault(copy.value, copy.destination)
    return found


def _kept_words(case: Case, kind: str, inputs: Sequence[str], homes: Mapping[str, str]) -> str:
    devices = list(dict.fromkeys(homes[name] for name in inputs))
    what = f"{name_list(inputs)} where they are used"
    if len(devices) < _FEW:
        groups = {d: name_list([name for name in inputs if homes[name] == d]) for d in devices}
        what = " and ".join(f"{group} on {device}" for device, group in groups.items())
    shown = ", ".join(f"{name!r}: {homes[name]!r}" for name in inputs[:_SHOWN])
    more = ", ..." if len(inputs) > _SHOWN else ""
    it, travels, same = "it", "travels", "it is the same tensor"
    if len(inputs) > 1:
        it, travels, same = "they", "travel", "they are the same tensors"
    why = f"elsewhere than on the host {it} would have to travel in each run"
    if _destinations(case, inputs):
        why = f"{it} {travels} from the host in each run"
    condition = f", if {same} in each run, as weights are" if kind == "keep inputs" else ""
    size = amount(_nbytes(case, inputs), "B")
    return f"keep {what} ({size}), by inputs={{{shown}{more}}}{condition}: {why}"


# ---- tasks that take less time than their launch, and busy threads
#
# Merging saves no launches, because a merged task calls its operators one by one. So the advice is
# to fuse kernels or to replay a CUDA graph, for merged tasks too.


def fuse_launches(case: Case) -> Iterator[Remedy]:
    """Suggest fusing tasks that take longer to launch than to run.

    Consecutive tasks that are launched as one would pay for one launch. ``asc.merge`` alone does
    not achieve that: the operators of a merged task are launched one by one, and count here like
    consecutive tasks.
    """
    rows: list[list[int]] = []
    open_rows: dict[Stream, list[int]] = {}
    launches = dict[int, float]()
    tasks = dict[int, Task]()
    for i, instruction in enumerate(case.program):
        if isinstance(instruction, Wait):
            open_rows.pop(instruction.stream, None)
        elif isinstance(instruction, Run) and case.seconds[i]:
            device = case.machine.device(instruction.stream.device)
            task = tasks[i] = case.graph.task(instruction.task)
            launches[i] = min(device.launch_seconds * case.costs.launches(task), case.seconds[i])
            if device.is_accelerator and launches[i] > case.seconds[i] / 2:
                if instruction.stream not in open_rows:
                    rows.append(open_rows.setdefault(instruction.stream, []))
                open_rows[instruction.stream].append(i)
            else:
                open_rows.pop(instruction.stream, None)
    faster = list(case.seconds)
    for row in rows:
        stream = case.program.instructions[row[0]].stream
        first = case.machine.device(stream.device).launch_seconds
        for i in row:
            faster[i] -= launches[i] - (min(first, launches[i]) if i == row[0] else 0.0)
    tiny = [i for row in rows if len(row) > 1 or faster[row[0]] < case.seconds[row[0]] for i in row]
    if tiny:
        names = tuple(tasks[i].name for i in tiny)
        launch = sum(launches[i] for i in tiny)
        whole = sum(case.seconds[i] for i in tiny)
        words = (
            f"{count(len(tiny), 'task')} of about {duration(whole / len(tiny))} "
            f"({name_list(names)}, {file_name(tasks[tiny[0]].source)}) "
            f"{'costs' if len(tiny) == 1 else 'cost'} more to launch ({duration(launch)}) than to "
            f"run ({duration(whole - launch)}): merge kernels into one (torch.compile), "
            "or replay all as a CUDA graph, by asc.schedule(..., replay=True)"
        )
        free = {*tiny}.difference(row[0] for row in rows)
        yield Advice("launch", words, names, (), case.timed(faster, free)), None


def replay_launches(case: Case) -> Iterator[Remedy]:
    """Suggest replaying CUDA graphs if threads of the host are busy issuing work."""
    if is_issued_late(case) and case.costs.replay is None:
        replayed = case.having(costs=replace(case.costs, replay=Replay()))
        words = f"{_busy(case)}: replay CUDA graphs, by asc.schedule(..., replay=True)"
        yield Advice("launch", words, (), (), replayed.makespan), replayed


def host_note(case: Case) -> Iterator[str]:
    """Note that the host bounds the makespan, if it would be shorter with work issued in no time."""
    if is_issued_late(case):
        free = duration(makespan(case.program, case.seconds))
        yield f"the host bounds the run: {_busy(case)}; issued in no time, it would take {free}"


def is_issued_late(case: Case) -> bool:
    """Return whether issuing work prolongs the run."""
    if case.issuing is None:
        return False
    return case.makespan - makespan(case.program, case.seconds) > LEAST * case.makespan


def _busy(case: Case) -> str:
    assert case.issuing is not None
    thread = dict(zip(case.program.streams, case.issuing.thread.tolist(), strict=True))
    busy: dict[int, float] = {}
    for instruction, seconds in zip(case.program, case.issuing.seconds.tolist(), strict=True):
        number = thread[instruction.stream]
        busy[number] = busy.get(number, float(case.issuing.begin[0])) + seconds
    return f"one thread is busy for {duration(max(busy.values()))} with issuing work"


# ---- other placements

_MOST = 20_000  # tasks, up to which there is time to plan again
_FAR = 3  # times the makespan, from which percentages are hard to read
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are still mentioned


def plans_of(case: Case, known: Placement | None = None) -> tuple[Case, ...]:
    """Return the plans of all policies, but that ``known``, the best first; none of large graphs."""
    if len(case.graph) > _MOST:
        return ()
    plans: list[Case] = []
    tried = [] if known is None else [known]
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


def change_placement(case: Case, plans: Sequence[Case]) -> Iterator[Remedy]:
    """Suggest other placements, and name the bindings that prevent them.

    ``plans`` respect bindings. Others ignore those to a CPU of tasks that are slow there, or those
    to accelerators.
    """
    best = case.makespan
    for plan in plans[:1]:
        yield _remedy(case, plan, "policy"), None
        best = min(best, plan.makespan)
    if case.slow_on_host:
        for plan in plans_of(case.unbound(case.slow_on_host))[:1]:
            moved = [t for t in case.slow_on_host if plan.placement.device[t.name] in case.workers]
            if plan.makespan < best and moved:
                yield _off_host_remedy(case, plan, moved), None
    if case.bound:
        for plan in plans_of(case.freed, case.placement)[:1]:
            if plan.makespan < best:
                free = plan.having(costs=case.costs)
                yield replace(_remedy(case, plan, "bound"), makespan=free.makespan), free


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
    auto = "policy='auto'" + (" without that" if bound else "")
    if len(plan.used) < len(case.used):
        kind = f"fewer {kind}"
        words = f"{_no_gain(case, plan.makespan)}; {_alone(plan)} takes less"
        if len(plan.used) > 1:
            words = f"{device_list(plan.used)} do better than {spelled(len(case.used))}"
        words += f", but {binding}" if bound else ""
    elif unused:
        kind = f"idle {kind}"
        stand, them = ("stands", "it") if len(unused) == 1 else ("stand", "them")
        reason = f"{binding}; " if bound else ""
        words = f"{device_list(unused)} could help and {stand} idle: {reason}{auto} uses {them}"
    elif plan.placement.device == case.placement.device:
        words = f"tasks could be issued in a better order: {auto} finds one"
    else:
        reason = f"{binding}; " if bound else "tasks could be placed better: "
        words = f"{reason}{auto} finds a faster plan"
    return Advice(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def _binding(case: Case, bound: Sequence[Task]) -> str:
    what = f"{count(len(bound), 'task')} {'is' if len(bound) == 1 else 'are'}"
    if 1 < len(bound) == len(case.graph.tasks):
        what = "all tasks are"
    devices = device_list(list(dict.fromkeys(str(case.problem.constraint(task)) for task in bound)))
    return f"{what} bound to {devices} (at {file_name(bound[0].source)}, or by place=)"


def device_count_note(case: Case, plans: Sequence[Case]) -> Iterator[str]:
    """Describe that more devices, or fewer, would not help."""
    more = [plan for plan in plans if len(plan.used) > len(case.used)]
    fewer = [plan for plan in plans if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan > 0:
        ratio = more[0].makespan / case.makespan
        longer = f"{percent(ratio - 1)} longer" if ratio > 1.005 else "as long"
        longer = f"{ratio:.0f} times as long" if ratio > _FAR else longer
        take = "takes" if len(more[0].used) == 1 else "take"
        devices = device_list(more[0].used)
        yield f"{_no_gain(more[0], case.makespan)} ({devices} {take} {longer})"
    elif fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        yield f"on {_alone(fewer[0])} it takes {duration(fewer[0].makespan)}, hardly longer"


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
