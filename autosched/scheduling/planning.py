"""Plan a schedule for a graph and a machine by a policy.

Joins the other modules. Only ``policy="auto"`` is implemented here, because it needs lowering and
simulation, which policies do not know: it chooses among placements by simulated makespan. Of plans
with equal makespan it takes the one with the fewest copies, since a copy that is not made cannot be
late.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autosched._lib.allowed import WORDS, device_name
from autosched._lib.gc_pause import without_collecting
from autosched._lib.logs import LOG
from autosched._lib.tree import flatten
from autosched.costs.costs import Costs
from autosched.errors import GraphError, MachineError, MemoryLimitError, ScheduleError, listed
from autosched.graph.graph import Graph, by_pattern
from autosched.lowering.fitting import confined, fitted, is_limited
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies import POLICIES, TIMED, Policy, Progress, candidates, m_etf, m_sct, single
from autosched.program.program import Copy
from autosched.runtime.backends import Backend, suited
from autosched.runtime.check import Check
from autosched.scheduling.arguments import check_kinds
from autosched.scheduling.hosting import put_on_host
from autosched.scheduling.progress_bar import bar
from autosched.scheduling.schedule import Schedule

__all__ = ["estimated", "paged", "policy_of", "schedule"]


def schedule(
    graph: Graph,
    machine: Machine | None = None,
    *,
    policy: str | Policy = "auto",
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
    costs: Costs | None = None,
    examples: Mapping[str, Any] | None = None,
    inputs: str | Mapping[str, str] | None = None,
    outputs: str | Mapping[str, str] | None = None,
    place: Mapping[str, str] | None = None,
    backend: str | Backend | None = None,
    check: Check = False,
    nvtx: bool = False,
    replay: bool = False,
) -> Schedule:
    """Place a graph's tasks on a machine, lower them to a program, and prove it race-free.

    * ``machine``: default ``Machine.local()``. No device ever holds more than its ``nbytes``:
      values that do not fit are spilled and reloaded. If the placement of a policy cannot be made
      to fit, ``"auto"`` is used instead.
    * ``policy``: a name, or a function ``(graph, machine, costs) -> Placement``. ``"auto"`` tries
      several, including each device alone, and takes the placement of least predicted makespan; of
      equal ones that with the fewest copies.
    * ``seconds``: how long ``"auto"``, ``"search"`` and ``"exact"`` may search for better plans.
      Without it ``"auto"`` takes a moment; it and ``"search"`` then count their work, so plans are
      reproducible. ``seed`` changes the random numbers of a search. ``progress`` is called with the
      part done and the best makespan, or is True for a bar on stderr.
    * ``costs``: given; or estimated from ``examples``, an input of each name; else all are equal.
    * ``inputs``, ``outputs``: the device on which an input is, or on which an output is requested,
      by names or patterns of names, ``{"w*": "cuda:0"}``; one device applies to all. Default:
      inputs are on the host, outputs stay on the device of their producer.
    * ``place``: devices by patterns of names of tasks or modules, ``{"layer1.*": "cuda:0"}``; the
      first match counts. Functions that read no tensor, as far as ``examples`` show, run on the
      host by default.
    * ``backend``: a name, or an ``autosched.runtime.backends.Backend``, which serves one schedule;
      default: the backend that fits the machine.
    * ``check``: monitor every run, not only the first, for writes, aliases and random numbers that
      tasks do not declare. ``"bytes"`` compares all bits of their arguments, since version counters
      do not detect every write.
    * ``nvtx``: put each task and copy into an NVTX range with its name and stream; CUDA only.
    * ``replay``: capture the work of accelerators in CUDA graphs and replay these: see
      ``Schedule.not_replayed``.

    Raises GraphError, MachineError or ScheduleError for arguments that do not fit together, or do
    not fit into memory.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> print(asc.schedule(graph, asc.Machine.emulated(gpus=2)))
    input x on cpu
    cpu/compute  run add
    output y on cpu
    """
    machine = _machine(machine)
    inputs = device_name(inputs)
    outputs = device_name(outputs)
    check_kinds(
        graph,
        costs,
        examples,
        inputs,
        outputs,
        backend,
        check,
        place,
        seconds,
        seed,
        progress,
        nvtx,
        replay,
    )
    backend = _backend(backend, machine, nvtx, replay)
    with without_collecting(), _told(progress) as report:
        pinned = _pinned(graph, machine, inputs, place, policy, examples)
        wanted = _wanted(graph, outputs)
        costs = _costs(costs, pinned, machine, examples)
        plan = functools.partial(_plan, pinned, machine, costs, wanted, backend, check, nvtx)
        # memory rules out some devices for some tasks
        made = _made(
            plan,
            pinned,
            machine,
            confined(pinned, machine, costs, wanted),
            policy,
            seconds,
            seed,
            report,
        )
    return made


def _told(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """Return the progress callback: a function of the caller's, a bar, or none."""
    return bar("planning") if progress is True else nullcontext(progress or None)


def _wanted(graph: Graph, outputs: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the requested device of outputs. Raises ScheduleError for unknown outputs."""
    if isinstance(outputs, str) or outputs is None:
        return {} if outputs is None else dict.fromkeys(graph.outputs, outputs)
    try:
        named = by_pattern(outputs, graph.outputs, "outputs", "output")
    except GraphError as error:
        raise ScheduleError(str(error)) from None
    return {label: device_name(device) for label, device in named.items()}


def _pinned(
    graph: Graph, machine: Machine, inputs: Any, place: Any, policy: Any, examples: Any
) -> Graph:
    """Return a copy of a graph for one schedule, with the user's constraints and the defaults."""
    pinned = graph.pinned(
        dict.fromkeys(graph.input_names, inputs) if isinstance(inputs, str) else inputs, place
    )
    if isinstance(policy, str):  # placements by a function of the user are not restricted
        put_on_host(pinned, examples)
    _check_inputs(pinned, machine)
    return pinned


def _costs(
    costs: Costs | None, graph: Graph, machine: Machine, examples: Mapping[str, Any] | None
) -> Costs:
    """Return the costs given, estimated, or equal. Raises ScheduleError for unknown tasks."""
    if costs is None:
        costs = estimated(graph, examples, level=4) if examples is not None else Costs()
        costs = paged(costs, graph, machine, examples)
    costs.check(graph)
    return costs


def _check_inputs(graph: Graph, machine: Machine) -> None:
    """Raise ScheduleError for unknown inputs, MachineError for unknown devices."""
    if taken := [word for word in WORDS if word in graph.input_names]:
        raise ScheduleError(
            f"an input cannot be named {taken[0]!r}: runs of a schedule take that word; rename it"
        )
    for value in graph.sources:
        machine.device(value.home or machine.host)


def _backend(
    backend: str | Backend | None, machine: Machine, nvtx: bool, replay: bool
) -> str | Backend:
    """Return the given or default backend; with ``replay`` one that can replay, or warn.

    Raises MachineError where ``nvtx`` has no CUDA device to mark.
    """
    made = suited(machine) if backend is None else backend
    if nvtx:
        kinds = dict.fromkeys(machine.device(name).kind for name in machine.accelerators)
        why = f"the machine has {listed(machine.names)} alone" if "cuda" not in kinds else ""
        if isinstance(made, str) and made not in ("accelerator", "replay"):
            why = why or f"backend {made!r} runs on none"
        if why:
            raise MachineError(f"nvtx=True shows CUDA devices to Nsight, and {why}; leave it out")
    if replay and made == "accelerator":
        return "replay"
    if replay and made != "replay" and not hasattr(made, "recorder"):
        what = f"replay=True is for accelerators, and backend {made!r} has none; runs are ordinary ones"
        warnings.warn(what, RuntimeWarning, stacklevel=3)
    return made


def _machine(machine: Machine | None) -> Machine:
    """Return the machine, by default the local one. Raises MachineError for other types."""
    if machine is None:
        return Machine.local()
    if not isinstance(machine, Machine):
        raise MachineError(
            f"machine must be a Machine, got {machine!r}; Machine.local() and Machine.emulated() make one"
        )
    return machine


def policy_of(
    policy: str | Policy,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Policy:
    """Return a policy, given or by name.

    Raises ScheduleError for unknown names and for ``seconds`` that the policy does not take.
    """
    if isinstance(policy, str) and policy in TIMED:
        return TIMED[policy](seconds, seed, progress=progress)
    if seconds is not None:
        timed = ", ".join(map(repr, ["auto", *TIMED]))
        raise ScheduleError(
            f"seconds= is for the policies {timed}; {policy!r} takes the time that it needs"
        )
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        known = ", ".join(map(repr, ["auto", *POLICIES, *TIMED]))
        raise ScheduleError(f"unknown policy {policy!r}; known are {known}, or pass a function")
    return POLICIES[policy]


def _plan(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    outputs: Mapping[str, str],
    backend: str | Backend,
    check: Check,
    nvtx: bool,
    placement: Placement,
) -> Schedule:
    """Lower a placement, and predict its makespan."""
    program = fitted(graph, machine, costs, placement, outputs)
    made = Schedule(graph, machine, costs, placement, program, backend, check, dict(outputs), nvtx)
    _ = made.makespan  # raises for instructions that the machine cannot execute
    return made


def _made(
    plan: Callable[[Placement], Schedule],
    graph: Graph,
    machine: Machine,
    costs: Costs,
    policy: str | Policy,
    *timed: Any,
) -> Schedule:
    """Plan with a policy, and prove the program race-free."""
    begun = time.perf_counter()
    made = _planned(plan, graph, machine, costs, policy, *timed)
    made.verify()
    what = (
        graph.name,
        listed(machine.names),
        policy,
        len(graph),
        made.makespan,
        time.perf_counter() - begun,
    )
    LOG.info("planned %r on %s by policy %s: %d tasks, %.3g s predicted, in %.3g s", *what)
    return made


def _planned(
    plan: Callable[[Placement], Schedule],
    graph: Graph,
    machine: Machine,
    costs: Costs,
    policy: str | Policy,
    *timed: Any,
) -> Schedule:
    """Plan with a policy, or with ``"auto"`` if its placement cannot be made to fit into memory."""
    if policy != "auto":
        try:
            return _best(plan, graph, machine, costs, [policy_of(policy, *timed)])
        except MemoryLimitError:
            timed = ()
    minding = (single, m_etf, m_sct) if is_limited(graph, machine, costs) else ()
    return _best(plan, graph, machine, costs, [*candidates(graph, machine, *timed), *minding])


def _best(
    plan: Callable[[Placement], Schedule],
    graph: Graph,
    machine: Machine,
    costs: Costs,
    policies: Iterable[Policy],
) -> Schedule:
    """Plan with each policy; return the least makespan, ties broken by the number of copies."""
    tried: list[Placement] = []
    plans: list[Schedule] = []
    refusal = ScheduleError(f"graph {graph.name!r} cannot run on this machine")
    for policy in policies:
        try:
            placement = policy(graph, machine, costs)
            if not isinstance(placement, Placement):
                raise ScheduleError(f"policy {policy!r} must return a Placement, got {placement!r}")
            if placement not in tried:
                tried.append(placement)
                plans.append(plan(placement))
        except ScheduleError as error:
            refusal = error
    if not plans:
        raise refusal
    if len(plans) == 1:
        return plans[0]
    return min(
        plans, key=lambda made: (made.makespan, sum(isinstance(i, Copy) for i in made.program))
    )


def paged(
    costs: Costs, graph: Graph, machine: Machine, examples: Mapping[str, Any] | None
) -> Costs:
    """Return costs that know which inputs and constants are in pageable memory.

    This applies to a real machine with accelerators; on an imagined machine the sources of copies
    are imagined, too.
    """
    if machine.imagined or not machine.accelerators:
        return costs
    known = examples or {}
    given = {
        value.name: known.get(value.name) if value.tensor is None else value.tensor
        for value in graph.sources
    }
    slow = frozenset(
        name for name, example in given.items() if any(map(_is_pageable, flatten(example)))
    )
    return dataclasses.replace(costs, pageable=slow)


def _is_pageable(leaf: Any) -> bool:
    """Whether this is a tensor in pageable host memory."""
    return hasattr(leaf, "is_pinned") and leaf.device.type == "cpu" and not leaf.is_pinned()


def estimated(graph: Graph, examples: Mapping[str, Any], level: int = 3) -> Costs:
    """Return ``Costs.estimate``, and warn of tasks whose durations are unknown.

    The warning points to the caller that many frames up.
    """
    from autosched.costs.estimate import estimate

    found = estimate(graph, examples)
    told = {task.name for task in graph.tasks if task.seconds is not None}
    unknown = {name: reason for name, reason in found.unknown.items() if name not in told}
    if unknown:
        guess = f"{found.costs.default_seconds * 1e6:.0f} us{' each' if len(unknown) > 1 else ''}"
        reason = next(iter(unknown.values()))
        warnings.warn(
            f"no estimate for {listed(unknown)}, taken to cost {guess} ({reason}); give seconds=",
            stacklevel=level,
        )
    return found.costs
