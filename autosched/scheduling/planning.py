"""Plan a schedule for a graph and a machine.

``schedule`` is one pipeline:

1. Check and normalise the arguments; choose the backend.
2. Copy the graph, with the user's constraints and the default devices.
3. Determine the costs, and rule out devices whose memory is too small for a task.
4. Choose policies: the given one, or for ``"auto"`` several candidates.
5. For each policy: compute a placement, lower it to a program that fits into memory, and predict
   its makespan, or its period if that is the objective. Take the least; of equal ones the fewest
   copies, since a copy that is not made cannot be late.
6. Verify the program, and return it as a Schedule.

``policy="auto"`` is implemented here, because it needs lowering and simulation, which policies do
not know. ``plans`` has step 5.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from autosched._lib.allowed import WORDS, device_name
from autosched._lib.gc_pause import without_collecting
from autosched._lib.logs import LOG
from autosched._lib.tree import flatten
from autosched.bounds import exceeds
from autosched.costs.costs import Costs, Replay
from autosched.errors import GraphError, MemoryLimitError, ScheduleError, listed
from autosched.graph.constraints import by_pattern, homes_of, hosted, placed
from autosched.graph.graph import Graph
from autosched.lowering.resident_state import keepable, keeping
from autosched.machine.machine import Machine, given_or_local
from autosched.placement import Placement
from autosched.policies import (
    POLICIES,
    TIMED,
    Policy,
    Progress,
    candidates,
    least_memory,
    search,
    single,
)
from autosched.policies.candidates import (
    fewer_devices,
    is_large,
    of_problem,
    promising,
    splits,
    stream_limits,
)
from autosched.problem import Constraints, Objective, Problem
from autosched.runtime.backends import Backend, check_name, suited
from autosched.runtime.check import Check
from autosched.scheduling.agreement import agreed
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.binding import Binding, binding_of
from autosched.scheduling.plans import best_plan, goal_of, merit, refusal, with_runs_in_flight
from autosched.scheduling.progress_bar import progress_bar
from autosched.scheduling.schedule import Schedule, joined
from autosched.simulation.plan import Plan


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
    replay: bool = False,
    in_flight: int | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """Place a graph's tasks on a machine, lower them to a program, and prove it race-free.

    * ``machine``: default ``Machine.local()``. No device ever holds more than its ``nbytes``:
      values that do not fit are spilled and reloaded. If the placement of a policy cannot be made
      to fit, ``"auto"`` is used instead.
    * ``policy``: a name, or a function ``(problem: Problem) -> Placement``. ``"auto"`` tries
      several, including each device alone and fewer devices, so that more are never slower, and
      takes the placement of least predicted makespan; of equal ones that with the fewest copies.
      Where issuing takes time, it also tries fewer streams.
    * ``seconds``: how long ``"auto"``, ``"search"`` and ``"exact"`` may search for better plans.
      Without it ``"auto"`` takes a moment; it and ``"search"`` then count their work, so plans are
      reproducible. ``seed`` changes the random numbers of a search. ``progress`` is called with the
      part done and the best makespan, or is True for a bar on stderr.
    * ``costs``: given; or estimated from ``examples``, an input of each name; else all are equal.
    * ``inputs``, ``outputs``: the device on which an input is, or on which an output is requested,
      by names or patterns of names, ``{"w*": "cuda:0"}``; one device applies to all. Default:
      inputs are on the host, state of captured steps is kept on the devices that use it, and
      outputs stay on the device of their producer; on real accelerators, those of captured steps,
      and in any case their new state, are where eager execution leaves them.
    * ``place``: devices by patterns of names of tasks or modules, ``{"layer1.*": "cuda:0"}``; the
      first match counts. Functions that read no tensor, as far as ``examples`` show, run on the
      host by default.
    * ``backend``: a name, or an ``autosched.runtime.backends.Backend``, which serves one schedule;
      default: the backend that fits the machine.
    * ``check``: monitor every run, not only the first, for writes, aliases and random numbers that
      tasks do not declare. ``"bytes"`` compares all bits of their arguments, since version counters
      do not detect every write.
    * ``replay``: capture the work of accelerators in CUDA graphs and replay these: see
      ``Schedule.not_replayed``. Where issuing takes time, it is predicted with ``costs.replay``.
    * ``in_flight``: how many runs may be under way at a time; fewer, with a warning, if their
      buffers do not fit into memory. Default: 1.
    * ``objective``: what plans minimize: the ``"makespan"`` of one run, or the ``"period"``, the
      seconds per run in steady state. With ``"period"``, ``"auto"`` and ``"search"`` also try to
      split the graph into stages of equal load, and ``in_flight`` is by default the smallest number
      that reaches the best period, within 1%.

    On a machine of ``Machine.cluster`` all ranks call this, with the same graph. Rank 0 plans; each
    rank checks that its graph is the same, and verifies the program.

    Raises GraphError, MachineError or ScheduleError for arguments that do not fit together, or do
    not fit into memory; on all ranks, where one of them does.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> print(asc.schedule(graph, asc.Machine.emulated(gpus=2)))
    input x on cpu
    cpu/compute  run add
    output y on cpu
    """
    machine = given_or_local(machine)

    def plan() -> Schedule:
        check_arguments(graph=graph, backend=backend, check=check, replay=replay)
        check_arguments(seconds=seconds, seed=seed, progress=progress)
        running = _backend(backend, machine, replay)
        shown = progress_bar("planning") if progress is True else nullcontext(progress or None)
        with without_collecting(), shown as report:
            problem = problem_of(
                graph,
                machine,
                costs=costs,
                examples=examples,
                inputs=inputs,
                outputs=outputs,
                place=place,
                in_flight=in_flight,
                objective=objective,
                hosts=isinstance(policy, str),
                replays=_replays(running),
            )
            _warn_of_no_results(problem.graph)
            return planned(problem, policy, seconds, seed, report, (running, check))

    if machine.rank is None:
        return plan()
    return agreed(graph, lambda: plan().text, lambda saved, rank: joined(saved, graph, rank))


# ---- 1. arguments


def _backend(backend: str | Backend | None, machine: Machine, replay: bool) -> str | Backend:
    """Return the given or default backend; with ``replay`` one that can replay, or warn."""
    if isinstance(backend, str):
        check_name(backend)
    made = suited(machine) if backend is None else backend
    if replay and made == "accelerator":
        return "replay"
    if replay and not _replays(made):
        what = f"replay=True is for accelerators, and backend {made!r} has none"
        warnings.warn(f"{what}; runs are ordinary ones", RuntimeWarning, stacklevel=4)
    return made


def _replays(backend: str | Backend) -> bool:
    """Whether a backend can replay what it has recorded."""
    return backend == "replay" if isinstance(backend, str) else hasattr(backend, "recorder")


# ---- 2. the problem


def problem_of(
    graph: Graph,
    machine: Machine,
    *,
    costs: Costs | None = None,
    examples: Mapping[str, Any] | None = None,
    inputs: str | Mapping[str, str] | None = None,
    outputs: str | Mapping[str, str] | None = None,
    place: Mapping[str, str] | None = None,
    in_flight: int | None = None,
    objective: Objective = "makespan",
    hosts: bool = True,
    replays: bool = False,
) -> Problem:
    """Return what is to be planned for a graph as it is now, by options of ``schedule``.

    Costs are given, estimated, or equal; with ``replays`` they are those of replayed graphs.
    ``hosts``: functions that read no tensor are bound to the host. Raises GraphError, MachineError
    and ScheduleError for options that do not fit.
    """
    inputs = device_name(inputs)
    outputs = device_name(outputs)
    check_arguments(graph=graph, costs=costs, examples=examples, inputs=inputs, outputs=outputs)
    check_arguments(place=place)
    goal = goal_of(objective, in_flight, machine)
    graph = graph.snapshot()
    binding = binding_of(graph)
    state = binding.state_on(graph, machine)
    if taken := [word for word in WORDS if word in graph.input_names]:
        raise ScheduleError(
            f"an input cannot be named {taken[0]!r}: runs of a schedule take that word; rename it"
        )
    homes = homes_of(graph, inputs)
    devices = placed(graph, place or {})
    devices |= hosted(graph, devices, examples) if hosts else {}
    constraints = Constraints({}, homes, devices, state)
    problem = Problem(graph, machine, constraints=constraints, goal=goal)
    for home in problem.homes.values():
        machine.device(home)
    problem = problem.constrained(outputs=_wanted(problem, outputs, binding))
    own = problem.graph
    if costs is None:
        costs = estimate_costs(own, examples) if examples is not None else Costs()
        costs = mark_pageable(costs, own, machine, examples)
    costs.check(own)
    if replays and costs.replay is None and costs.has_issuing(machine.devices):
        costs = dataclasses.replace(costs, replay=Replay())
    problem = dataclasses.replace(problem, costs=costs)
    return keeping(problem, keepable(problem))


def _wanted(
    problem: Problem, outputs: str | Mapping[str, str] | None, binding: Binding
) -> dict[str, str]:
    """Return the requested device of outputs. Raises ScheduleError for unknown outputs."""
    labels = problem.graph.outputs
    machine = problem.machine
    if isinstance(outputs, str) or outputs is None:
        named = {} if outputs is None else dict.fromkeys(labels, outputs)
    else:
        try:
            named = by_pattern(outputs, labels, "outputs", "output")
        except GraphError as error:
            raise ScheduleError(str(error)) from None
    named = {label: device_name(device) for label, device in named.items()}
    if machine.imagined or machine.ranks or not machine.accelerators:
        return named
    devices = {physical or "cpu": name for name, physical in reversed(machine.physical.items())}
    devices["cpu"] = machine.host
    homes = {label: devices[home] for label, home in binding.homes.items() if home in devices}
    state = {label: home for label, home in homes.items() if label in binding.made}
    return homes | named | state


def _warn_of_no_results(graph: Graph) -> None:
    """Warn if a run returns and changes nothing, unless the durations are given: to plan alone."""
    if graph.outputs or not any(task.fn and task.seconds is None for task in graph.tasks):
        return
    if not any(graph.last_version(value.index) for value in graph.sources):
        what = f"graph {graph.name!r} has no outputs and changes no input, so a run returns {{}}"
        warnings.warn(f"{what}; write graph.output(name=value)", stacklevel=4)


# ---- 3. costs


def estimate_costs(graph: Graph, examples: Mapping[str, Any]) -> Costs:
    """Return ``Costs.estimate``, and warn of tasks whose durations are unknown."""
    from autosched.costs.estimate import estimate

    found = estimate(graph, examples)
    found.warn(graph)
    return found.costs


def mark_pageable(
    costs: Costs, graph: Graph, machine: Machine, examples: Mapping[str, Any] | None
) -> Costs:
    """Return costs with the names of the inputs and constants in pageable memory.

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


# ---- 4. to 6. policies


def planned(
    problem: Problem,
    policy: str | Policy,
    seconds: float | None,
    seed: int,
    progress: Progress | None = None,
    running: tuple[str | Backend, Check] = ("host", False),
) -> Schedule:
    """Return a verified schedule by a policy; ``running`` are its backend and ``check``."""
    begun = time.perf_counter()
    try:
        plan = with_runs_in_flight(problem, _plan(problem, policy, seconds, seed, progress))
    except MemoryLimitError as error:
        make = partial(_plan, policy=policy, seconds=None, seed=seed, progress=None)
        raise MemoryLimitError(refusal(problem, error, make)) from None
    made = Schedule(plan.problem, plan.placement, plan.program, *running)
    made.verify()
    graph = problem.graph
    facts = graph.name, listed(problem.devices), policy, len(graph), plan.makespan
    taken = time.perf_counter() - begun
    LOG.info("planned %r on %s by policy %s: %d tasks, %.3g s predicted, in %.3g s", *facts, taken)
    return made


def _plan(
    problem: Problem,
    policy: str | Policy,
    seconds: float | None,
    seed: int,
    progress: Progress | None,
) -> Plan:
    """Plan by a policy, or by ``"auto"`` if its placement does not fit."""
    stages: tuple[Policy, ...] = ()
    if problem.goal.objective == "period" and policy in ("auto", "search"):
        stages = splits(problem, seconds, seed, progress)
        seconds = progress = None
    if policy == "auto":
        return _best(problem, (*candidates(problem, seconds, seed, progress), *stages))
    try:
        plan = best_plan(problem, [*stages, find_policy(policy, seconds, seed, progress)])
    except MemoryLimitError:
        return _best(problem, candidates(problem))
    return _better(problem, plan) if policy == "exact" else plan


def _better(problem: Problem, plan: Plan) -> Plan:
    """Return the best of an exact plan and those of all policies, unless it is proved to be optimal.

    What the solver does not model, such as copies of outputs, may favour another one.
    """
    policies = (*candidates(problem), *POLICIES.values(), search())
    if problem.goal.objective == "period":
        policies = (*policies, *splits(problem))
    elif plan.makespan <= plan.placement.bound:
        return plan
    best = _best(problem, (lambda *_: plan.placement, *policies))
    bound = max(plan.placement.bound, best.placement.bound)
    return dataclasses.replace(best, placement=dataclasses.replace(best.placement, bound=bound))


def _best(problem: Problem, policies: Iterable[Policy]) -> Plan:
    """Return the best plan of several policies, also on fewer devices.

    More devices may mislead lists and searches. Plans for fewer are tried, unless a bound shows that
    none is shorter; of a large graph, if lists promise that they are. Splits into stages, for the
    period, find those that need few devices.
    """
    frugal = (single, least_memory) if problem.is_limited else ()
    limits = stream_limits(problem)
    if problem.has_sharing:
        # Policies count on each stream doing what the device can do.
        one = dataclasses.replace(problem.confined, machine=problem.machine.with_one_stream)
        policies = (*policies, *of_problem(one, candidates(problem)))
    tried: list[Placement] = []
    plan = best_plan(problem, (*policies, *frugal), limits, tried)
    if problem.goal.objective == "period":
        return plan
    if is_large(problem):
        for makespan, policy in promising(problem):
            if makespan < plan.makespan:
                plan = min(plan, best_plan(problem, [policy], limits), key=merit)
        return plan
    for fewer in fewer_devices(problem.confined):
        if exceeds(fewer, plan.makespan):
            break  # what is planned for still fewer devices is possible on these, too
        others = of_problem(fewer, (*candidates(fewer), *frugal))
        with suppress(ScheduleError):  # all were tried, or none is possible
            plan = min(plan, best_plan(problem, others, limits, tried), key=merit)
    return plan


def find_policy(
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
        _check_signature(policy)
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        known = ", ".join(map(repr, ["auto", *POLICIES, *TIMED]))
        raise ScheduleError(f"unknown policy {policy!r}; known are {known}, or pass a function")
    return POLICIES[policy]


def _check_signature(policy: Policy) -> None:
    """Raise ScheduleError for a function that cannot be called with a problem alone."""
    try:
        inspect.signature(policy).bind(None)
    except ValueError:  # its signature is unknown
        return
    except TypeError as error:
        what = "a policy is a function of one problem, which has the graph, the machine and costs"
        raise ScheduleError(f"{what}; {policy!r} cannot be called with one: {error}") from None
