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
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from autosched._lib.allowed import WORDS, device_name
from autosched._lib.gc_pause import without_collecting
from autosched._lib.logs import LOG
from autosched._lib.tree import flatten
from autosched.bounds import exceeds
from autosched.costs.costs import Costs, Replay
from autosched.errors import GraphError, MachineError, MemoryLimitError, ScheduleError, listed
from autosched.graph.graph import HOST, Graph, Here, Task, Value
from autosched.graph.pinning import by_pattern
from autosched.lowering.resident_state import keepable, keeping
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies import (
    POLICIES,
    TIMED,
    Policy,
    Progress,
    candidates,
    least_memory,
    m_etf,
    search,
    single,
)
from autosched.policies.candidates import (
    fewer_devices,
    of_problem,
    splits,
    stream_limits,
)
from autosched.problem import Constraints, Goal, Objective, Problem
from autosched.runtime.backends import Backend, check_name, suited
from autosched.runtime.check import Check
from autosched.scheduling.agreement import agreed
from autosched.scheduling.arguments import check_arguments, checked_count
from autosched.scheduling.plans import Plan, best_plan, goal_of, merit, with_runs_in_flight
from autosched.scheduling.progress_bar import progress_bar
from autosched.scheduling.schedule import Schedule, joined


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
    * ``nvtx``: put each task and copy into an NVTX range with its name and stream; CUDA only.
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
    machine = _machine(machine)
    options: dict[str, Any] = {
        **{"policy": policy, "seconds": seconds, "seed": seed, "progress": progress},
        **{"costs": costs, "examples": examples, "inputs": inputs, "outputs": outputs},
        **{"place": place, "backend": backend, "check": check, "nvtx": nvtx, "replay": replay},
        **{"in_flight": in_flight, "objective": objective},
    }
    if machine.rank is None:
        return _schedule(graph, machine, **options)
    made: Schedule = agreed(
        graph,
        lambda: check_arguments(graph=graph),
        lambda: _schedule(graph, machine, **options).text,
        lambda saved: dataclasses.replace(joined(saved, graph), nvtx=nvtx),
    )
    return made


def _schedule(
    graph: Graph,
    machine: Machine,
    *,
    policy: str | Policy,
    seconds: float | None,
    seed: int,
    progress: Progress | bool | None,
    costs: Costs | None,
    examples: Mapping[str, Any] | None,
    inputs: str | Mapping[str, str] | None,
    outputs: str | Mapping[str, str] | None,
    place: Mapping[str, str] | None,
    backend: str | Backend | None,
    check: Check,
    nvtx: bool,
    replay: bool,
    in_flight: int | None,
    objective: Objective,
) -> Schedule:
    """Return a schedule, made by this process alone."""
    # 1. Check and normalise the arguments; choose the backend.
    inputs = device_name(inputs)
    outputs = device_name(outputs)
    check_arguments(graph=graph, costs=costs, examples=examples, inputs=inputs, outputs=outputs)
    check_arguments(place=place, backend=backend, seconds=seconds, seed=seed, progress=progress)
    check_arguments(nvtx=nvtx, replay=replay, check=check)
    if in_flight is not None:
        checked_count(in_flight, "in_flight", 1)
    goal = goal_of(objective, in_flight)
    if machine.ranks and goal.in_flight != 1:
        raise ScheduleError(
            "several ranks execute one run at a time; use in_flight=1 and objective='makespan'"
        )
    backend = _backend(backend, machine, nvtx, replay)
    with without_collecting(), _progress_callback(progress) as report:
        # 2. Copy the graph, with the user's constraints and the default devices.
        pinned = _pinned(graph, machine, inputs, place, policy, examples)
        wanted = _wanted(graph, machine, outputs)
        _warn_of_no_results(pinned)
        # 3. Determine the costs, and rule out devices whose memory is too small for a task.
        costs = _costs(costs, pinned, machine, examples)
        if _replays(backend) and costs.replay is None and costs.has_issuing(machine.devices):
            costs = dataclasses.replace(costs, replay=Replay())
        problem = problem_of(pinned, machine, costs, wanted, goal)
        # 4., 5. Place, lower and predict.
        begun = time.perf_counter()
        plan = with_runs_in_flight(problem, _plan(problem, policy, seconds, seed, report))
        # 6. Verify.
        parts = plan.placement, plan.program, backend, check, nvtx
        made = Schedule(plan.problem, *parts)
        made.verify()
        facts = pinned.name, listed(machine.names), policy, len(pinned), plan.makespan
        taken = time.perf_counter() - begun
        LOG.info(
            "planned %r on %s by policy %s: %d tasks, %.3g s predicted, in %.3g s", *facts, taken
        )
    return made


# ---- 1. arguments


def _progress_callback(
    progress: Progress | bool | None,
) -> AbstractContextManager[Progress | None]:
    """Return the progress callback: a function of the caller's, a bar, or none."""
    return progress_bar("planning") if progress is True else nullcontext(progress or None)


def _machine(machine: Machine | None) -> Machine:
    """Return the machine, by default the local one. Raises MachineError for other types."""
    if machine is None:
        return Machine.local()
    if not isinstance(machine, Machine):
        hint = "Machine.local() and Machine.emulated() make one"
        raise MachineError(f"machine must be a Machine, got {machine!r}; {hint}")
    return machine


def _backend(
    backend: str | Backend | None, machine: Machine, nvtx: bool, replay: bool
) -> str | Backend:
    """Return the given or default backend; with ``replay`` one that can replay, or warn.

    Raises MachineError where ``nvtx`` has no CUDA device to mark.
    """
    if isinstance(backend, str):
        check_name(backend)
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
    if replay and not _replays(made):
        what = f"replay=True is for accelerators, and backend {made!r} has none"
        warnings.warn(f"{what}; runs are ordinary ones", RuntimeWarning, stacklevel=4)
    return made


def _replays(backend: str | Backend) -> bool:
    """Whether a backend can replay what it has recorded."""
    return backend == "replay" if isinstance(backend, str) else hasattr(backend, "recorder")


# ---- 2. the graph


def _pinned(
    graph: Graph, machine: Machine, inputs: Any, place: Any, policy: Any, examples: Any
) -> Graph:
    """Return a copy of the graph with constraints and default devices."""
    pinned = graph.pinned(
        dict.fromkeys(graph.input_names, inputs) if isinstance(inputs, str) else inputs, place
    )
    if isinstance(policy, str):  # placements by a function of the user are not restricted
        put_on_host(pinned, examples)
    _check_inputs(pinned, machine)
    return pinned


def _check_inputs(graph: Graph, machine: Machine) -> None:
    """Raise ScheduleError for unknown inputs, MachineError for unknown devices."""
    if taken := [word for word in WORDS if word in graph.input_names]:
        raise ScheduleError(
            f"an input cannot be named {taken[0]!r}: runs of a schedule take that word; rename it"
        )
    for value in graph.sources:
        machine.device(value.home or machine.host)


def _wanted(
    graph: Graph, machine: Machine, outputs: str | Mapping[str, str] | None
) -> dict[str, str]:
    """Return the requested device of outputs. Raises ScheduleError for unknown outputs."""
    if isinstance(outputs, str) or outputs is None:
        named = {} if outputs is None else dict.fromkeys(graph.outputs, outputs)
    else:
        try:
            named = by_pattern(outputs, graph.outputs, "outputs", "output")
        except GraphError as error:
            raise ScheduleError(str(error)) from None
    named = {label: device_name(device) for label, device in named.items()}
    if machine.imagined or machine.ranks or not machine.accelerators:
        return named
    devices = {physical or "cpu": name for name, physical in reversed(machine.physical.items())}
    devices["cpu"] = machine.host
    homes = {label: devices[home] for label, home in graph.homes.items() if home in devices}
    state = {label: home for label, home in homes.items() if label in graph.made}
    return homes | named | state


def _warn_of_no_results(graph: Graph) -> None:
    """Warn if a run returns and changes nothing, unless the durations are given: to plan alone."""
    if graph.outputs or not any(task.fn and task.seconds is None for task in graph.tasks):
        return
    if not any(graph.last_version(value.index) for value in graph.sources):
        what = f"graph {graph.name!r} has no outputs and changes no input, so a run returns {{}}"
        warnings.warn(f"{what}; write graph.output(name=value)", stacklevel=4)


# ---- 3. costs


def _costs(
    costs: Costs | None, graph: Graph, machine: Machine, examples: Mapping[str, Any] | None
) -> Costs:
    """Return the costs given, estimated, or equal. Raises ScheduleError for unknown tasks."""
    if costs is None:
        costs = estimate_costs(graph, examples, level=5) if examples is not None else Costs()
        costs = mark_pageable(costs, graph, machine, examples)
    costs.check(graph)
    return costs


def estimate_costs(graph: Graph, examples: Mapping[str, Any], level: int = 3) -> Costs:
    """Return ``Costs.estimate``, and warn of tasks whose durations are unknown.

    The warning points to the caller that many frames up.
    """
    from autosched.costs.estimate import estimate

    found = estimate(graph, examples)
    given = {task.name for task in graph.tasks if task.seconds is not None}
    unknown = {name: reason for name, reason in found.unknown.items() if name not in given}
    if unknown:
        guess = f"{found.costs.default_seconds * 1e6:.0f} us{' each' if len(unknown) > 1 else ''}"
        reason = next(iter(unknown.values()))
        warnings.warn(
            f"no estimate for {listed(unknown)}, taken to cost {guess} ({reason}); give seconds=",
            stacklevel=level,
        )
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


def problem_of(
    graph: Graph, machine: Machine, costs: Costs, outputs: Mapping[str, str], goal: Goal
) -> Problem:
    """Return what is to be planned, with the state that may stay on devices."""
    problem = Problem(graph, machine, costs, Constraints(outputs), goal)
    return keeping(problem, keepable(graph, machine))


# ---- 4. policies


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
    return best._replace(placement=dataclasses.replace(best.placement, bound=bound))


def _best(problem: Problem, policies: Iterable[Policy]) -> Plan:
    """Return the best plan of several policies, also on fewer devices.

    More devices may mislead lists and searches. Plans for fewer are tried, unless a bound shows that
    none is shorter. Splits into stages, for the period, find those that need few devices.
    """
    frugal = (single, m_etf, least_memory) if problem.is_limited else ()
    limits = stream_limits(problem)
    machine = problem.machine
    if machine.contention and problem.costs.has_sharing(machine.devices):
        # Policies count on each stream doing what the device can do.
        one = dataclasses.replace(problem.confined, machine=machine.with_one_stream)
        policies = (*policies, *of_problem(one, candidates(problem)))
    tried: list[Placement] = []
    plan = best_plan(problem, (*policies, *frugal), limits, tried)
    smaller = fewer_devices(problem.confined) if problem.goal.objective == "makespan" else ()
    for fewer in smaller:
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


# ---- tasks without tensor arguments run on the host


def put_on_host(graph: Graph, examples: Mapping[str, Any] | None) -> None:
    """Bind tasks without tensor arguments to the host, unless they are constrained already.

    ``examples`` are known inputs by name; an input that is not among them counts as a tensor. The
    graph must be the schedule's own.

    >>> graph = Graph()
    >>> words, x = graph.inputs("words", "x")
    >>> graph.output(graph.add(" ".join, words, name="join"), graph.add(abs, x, name="abs"))
    >>> pinned = graph.pinned()
    >>> put_on_host(pinned, {"words": ["a", "b"]})
    >>> pinned.task("join").device, pinned.task("abs").device
    ('host', None)
    """
    no_tensors = {name for name, item in (examples or {}).items() if not _has_tensor(item)}
    for task in graph.tasks:
        sources = (graph.values[use.value] for use in task.reads)
        if _is_unconstrained(task) and all(_is_among(value, no_tensors) for value in sources):
            bound = dataclasses.replace(task, device=HOST)
            graph.tasks[task.index] = bound
            if graph.names[task.name] is task:
                graph.names[task.name] = bound


def _is_unconstrained(task: Task) -> bool:
    """Whether a task calls a function, and neither the task nor the user constrains its device."""
    if task.fn is None or task.composite is not None or task.view:
        return False
    if task.device is not None or task.seconds is not None:
        return False
    return not any(isinstance(leaf, Here) for leaf in flatten((task.args, task.kwargs)))


def _is_among(value: Value, names: set[str]) -> bool:
    """Whether a value is an input with one of these names."""
    return value.producer is None and value.tensor is None and value.name in names


def _has_tensor(item: Any) -> bool:
    return any(hasattr(leaf, "data_ptr") for leaf in flatten(item))
