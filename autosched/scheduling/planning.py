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
    """Place a graph's tasks on a machine, lower them to a program, and prove that it cannot race.

    * ``machine``: default ``Machine.local()``. No device ever holds more than its ``nbytes``: what
      has no room leaves and is fetched back; where what a policy places cannot be made to fit,
      ``"auto"`` decides.
    * ``policy``: a name, or a function ``(graph, machine, costs) -> Placement``. ``"auto"`` tries
      several, one device alone among them, and takes what is predicted to end first; of equals that
      with the fewest copies.
    * ``seconds``: how long ``"auto"``, ``"search"`` and ``"exact"`` may look for better plans;
      without it ``"auto"`` takes a moment, and it and ``"search"``, which count their work, plan
      the same each time. ``seed`` makes a search another one; ``progress`` is called with the part
      done and the best makespan, or is True for a bar on stderr.
    * ``costs``: given; or estimated from ``examples``, an input of each name; else each task costs
      the same.
    * ``inputs``, ``outputs``: the device on which an input lives, or an output is wanted, by names
      or patterns of them,
      ``{"w*": "cuda:0"}``; one device is for all. Default: inputs live on the host, outputs stay where they are made.
    * ``place``: devices by patterns of names of tasks or modules, ``{"layer1.*": "cuda:0"}``; the
      first counts. Functions that read no tensor, as far as ``examples`` tell, run on the host by
      default.
    * ``backend``: a name, or an ``autosched.runtime.backends.Backend``, which serves one schedule;
      default: what fits.
    * ``check``: watch every run, not only the first, for writes, aliases and random numbers that
      tasks do not declare;
      ``"bytes"`` compares all bits of their arguments: version counters do not see every write.
    * ``nvtx``: put each task and copy into a range of NVTX that names it and its stream, for
      Nsight; CUDA alone has it.
    * ``replay``: record what accelerators do, and replay it, by CUDA graphs: see
      ``Schedule.not_replayed``.

    Raises GraphError, MachineError or ScheduleError for what does not fit together, or into memory.

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
    """Return who is told how far planning is: a function of the caller's, a bar, or nobody."""
    return bar("planning") if progress is True else nullcontext(progress or None)


def _wanted(graph: Graph, outputs: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the device of each output that is wanted on one. Raises ScheduleError for what is no output."""
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
    """Return a copy of a graph for one schedule, with what its user says about devices, and the host by default."""
    pinned = graph.pinned(
        dict.fromkeys(graph.input_names, inputs) if isinstance(inputs, str) else inputs, place
    )
    if isinstance(policy, str):  # a function places as it likes
        put_on_host(pinned, examples)
    _check_inputs(pinned, machine)
    return pinned


def _costs(
    costs: Costs | None, graph: Graph, machine: Machine, examples: Mapping[str, Any] | None
) -> Costs:
    """Return the costs given, or estimated, or the same for each task. Raises ScheduleError for names of no task."""
    if costs is None:
        costs = estimated(graph, examples, level=4) if examples is not None else Costs()
        costs = paged(costs, graph, machine, examples)
    costs.check(graph)
    return costs


def _check_inputs(graph: Graph, machine: Machine) -> None:
    """Raise ScheduleError for names that inputs cannot have, MachineError where they live on no device."""
    if taken := [word for word in WORDS if word in graph.input_names]:
        raise ScheduleError(
            f"an input cannot be named {taken[0]!r}: runs of a schedule take that word; rename it"
        )
    for value in graph.sources:
        machine.device(value.home or machine.host)


def _backend(
    backend: str | Backend | None, machine: Machine, nvtx: bool, replay: bool
) -> str | Backend:
    """Return the backend, or what fits; one that replays, if it is asked to and can, or else a warning.

    Raises MachineError where ``nvtx`` has nothing that Nsight could watch.
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
    """Return the machine, or this one. Raises MachineError for what is none."""
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
    """Return a policy by name, or as it is. Raises ScheduleError for unknown names, and for time that none takes."""
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
    """Lower a placement, and predict."""
    program = fitted(graph, machine, costs, placement, outputs)
    made = Schedule(graph, machine, costs, placement, program, backend, check, dict(outputs), nvtx)
    _ = made.makespan  # raises for what the machine cannot do
    return made


def _made(
    plan: Callable[[Placement], Schedule],
    graph: Graph,
    machine: Machine,
    costs: Costs,
    policy: str | Policy,
    *timed: Any,
) -> Schedule:
    """Plan with a policy, and prove that it cannot race."""
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
    """Plan with a policy; where what it places cannot be made to fit into memory, as ``"auto"`` would."""
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
    """Plan with each policy; return what is predicted to end first, of equals that with the fewest copies."""
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
    """Return costs that know which inputs and constants lie in memory that is not page-locked.

    On a real machine with accelerators: what an imagined one copies from is imagined too.
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
    """Whether this is a tensor in host memory that is not page-locked."""
    return hasattr(leaf, "is_pinned") and leaf.device.type == "cpu" and not leaf.is_pinned()


def estimated(graph: Graph, examples: Mapping[str, Any], level: int = 3) -> Costs:
    """Return ``Costs.estimate``, and warn the caller so many calls up of tasks whose seconds nothing tells."""
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
