"""Express a scheduling problem as constraints for OR-Tools CP-SAT.

Each task has a start, an end and a device. Where copies occupy no stream, a task starts after each
value that it reads, delayed by the duration of the copy. Otherwise each copy that some choice of
devices requires has a start and an end too, and occupies its copy streams. Tasks on the same
compute stream do not overlap; a device with several streams runs as many tasks concurrently.

The model describes what programs can do, and contains no heuristics.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autosched.policies.base.listing import Listed
from autosched.policies.constraint_programming.integer_times import IntegerTimes, Moment

_Literal = Any  # a Boolean variable or its negation


class _Copy(NamedTuple):
    """Variables: whether a datum is copied to a device, its start and its end."""

    sent: _Literal
    start: Any
    end: Any


class Model:
    """The constraints, and the variables for the devices and times of tasks."""

    def __init__(self, integer: IntegerTimes, least: int, most: int):
        self.integer = integer
        self.problem = integer.problem
        self.most = most
        self.cp = cp_model.CpModel()
        self.false, self.true = self.cp.new_constant(0), self.cp.new_constant(1)
        self.makespan = self.cp.new_int_var(least, most, "makespan")
        self.chosen: dict[int, dict[int, _Literal]] = {}  # by group: whether it is on a device
        self.start: dict[int, Any] = {}  # by task
        self.end: dict[int, Any] = {}
        self.copies: dict[tuple[int, int], _Copy] = {}  # by datum and device
        # By copy stream: the intervals of copies that occupy it.
        self.streams: dict[tuple[str, int], list[Any]] = {}
        self._tasks()
        self._compute()
        self._dependencies()
        if any(self.problem.lists.holds_out) or any(self.problem.lists.holds_in):
            self._copies()
        self.cp.minimize(self.makespan)

    def on(self, task: int, device: int) -> _Literal:
        """Return whether a task runs on a device."""
        return self.chosen[self.problem.lists.group[task]].get(device, self.false)

    def hint(self, plan: Listed) -> None:
        """Give the solver an initial solution."""
        model = self.cp
        count = self.integer.count
        for group, chosen in self.chosen.items():
            for p, here in chosen.items():
                model.add_hint(here, p == plan.device[group])
        for task, p in enumerate(plan.device):
            start = count(plan.start[task])
            model.add_hint(self.start[task], start)
            model.add_hint(self.end[task], start + self.integer.seconds[task][p])
        begins = dict(zip(plan.copies.tolist(), plan.begins.tolist(), strict=True))
        for (datum, p), copy in self.copies.items():
            begin = begins.get(datum * len(self.problem.devices) + p)
            model.add_hint(copy.sent, begin is not None)
            if begin is not None:
                model.add_hint(copy.start, count(begin))
        model.add_hint(self.makespan, self.most)

    def _tasks(self) -> None:
        """Add the device and the times of each task, within its earliest start and latest end."""
        model = self.cp
        for task, devices in enumerate(self.integer.devices):
            group = self.problem.lists.group[task]
            if group not in self.chosen:
                self.chosen[group] = {p: model.new_bool_var("") for p in devices}
                model.add_exactly_one(self.chosen[group].values())
            head = self.integer.heads[task]
            tail = self.integer.tails[task]
            first = min(head[p] for p in devices)
            last = min(tail[p] for p in devices)
            start = model.new_int_var(first, self.most, "")
            end = model.new_int_var(first, self.most - last, "")
            for p in devices:
                model.add(start >= head[p]).only_enforce_if(self.on(task, p))
                model.add(end + tail[p] <= self.makespan).only_enforce_if(self.on(task, p))
            self.start[task] = start
            self.end[task] = end

    def _compute(self) -> None:
        """Add the capacity of compute streams, and that their total work fits into the makespan."""
        model = self.cp
        integer = self.integer
        for p, count in enumerate(self.problem.lists.streams):
            tasks = [task for task, devices in enumerate(integer.devices) if p in devices]
            running = []
            for task in tasks:
                times = self.start[task], integer.seconds[task][p], self.end[task]
                running.append(model.new_optional_interval_var(*times, self.on(task, p), ""))
            if count == 1:
                model.add_no_overlap(running)
            else:
                model.add_cumulative(running, [1] * len(running), count)
            model.add(
                sum(integer.seconds[task][p] * self.on(task, p) for task in tasks)
                <= count * self.makespan
            )

    def _dependencies(self) -> None:
        """Add precedences between tasks, with delays where data are copied."""
        for task in self.start:
            for maker in self.problem.before[task]:
                self.cp.add(self.start[task] >= self.end[maker])
        for (maker, task), between in self.integer.apart.items():
            for seconds in sorted({number for number in between.values() if number}):
                self._far(maker, task, seconds)

    def _far(self, maker: int, task: int, seconds: int) -> None:
        """Add the delay of a task after a producer, unless their devices are closer."""
        far = self.cp.new_bool_var("")
        between = self.integer.apart[maker, task]
        self.cp.add(self.start[task] >= self.end[maker] + seconds).only_enforce_if(far)
        for p in self.integer.devices[task]:
            nearer = [q for q in self.integer.devices[maker] if between.get((q, p), 0) < seconds]
            self.cp.add_bool_or(~self.on(task, p), far, *(self.on(maker, q) for q in nearer))
            for q in nearer:
                self.cp.add_bool_or(~self.on(task, p), ~far, ~self.on(maker, q))

    def _copies(self) -> None:
        """Add one copy for each datum and device that needs it, on the streams that it occupies."""
        readers: dict[tuple[int, int], list[int]] = {}
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                for p in self.integer.devices[task]:
                    readers.setdefault((datum, p), []).append(task)
        for datum, p in dict.fromkeys([*readers, *self.problem.returns]):
            if any(q != p for q, _ in self.integer.sources[datum]):
                self._copy(datum, p, readers.get((datum, p), []))
        for intervals in self.streams.values():
            self.cp.add_no_overlap(intervals)

    def _copy(self, datum: int, p: int, readers: Sequence[int]) -> None:
        model = self.cp
        maker = self.problem.lists.maker[datum]
        back = (datum, p) in self.problem.returns
        here = self.on(maker, p) if maker >= 0 else self.false
        sent = model.new_bool_var("")
        start = model.new_int_var(0, self.most, "")
        end = model.new_int_var(0, self.most, "")
        self.copies[datum, p] = _Copy(sent, start, end)
        model.add_implication(sent, ~here)
        for task in readers:
            model.add_bool_or(~self.on(task, p), here, sent)
            model.add(self.start[task] >= end).only_enforce_if(sent, self.on(task, p))
        if back:
            model.add_bool_or(here, sent)
            model.add(end <= self.makespan).only_enforce_if(sent)
        else:
            model.add_bool_or(~sent, *(self.on(task, p) for task in readers))
        if maker >= 0:
            model.add(start >= self.end[maker]).only_enforce_if(sent)
        self._travel(datum, p, sent, start, end)

    def _travel(self, datum: int, p: int, sent: _Literal, start: Any, end: Any) -> None:
        """Add the duration of a copy from each possible source, and its streams."""
        model = self.cp
        maker = self.problem.lists.maker[datum]
        sources = [(q, row) for q, row in self.integer.sources[datum] if q != p]
        ways: list[_Literal] = []
        for q, row in sources:
            seconds = self.integer.copy(datum, row, p)
            way = sent if len(sources) == 1 else model.new_bool_var("")
            ways.append(way)
            if len(sources) > 1:
                model.add_bool_or(~sent, ~self.on(maker, q), way)
                model.add_implication(way, self.on(maker, q))
            interval = model.new_optional_interval_var(start, seconds, end, way, "")
            path = row * len(self.problem.devices) + p
            if self.problem.lists.holds_out[path]:
                self.streams.setdefault(("out", q), []).append(interval)
            if self.problem.lists.holds_in[path]:
                self.streams.setdefault(("in", p), []).append(interval)
        model.add(sum(ways) == sent)


class Answer(NamedTuple):
    """The result of a solver: devices and times of the best solution, if any, and a lower bound."""

    device: Sequence[int]  # by task
    tasks: Sequence[Moment]
    copies: dict[tuple[int, int], Moment]  # by datum and device
    makespan: float
    bound: float


def solve(
    model: Model,
    seconds: float | None,
    work: float,
    seed: int,
    improved: Callable[[float], None] | None = None,
) -> Answer:
    """Run the solver in a thread, so that Control-C stops it with the best solution so far.

    It is limited in seconds, or else in deterministic, hence reproducible, work. ``improved`` is
    called with each better makespan.
    """
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.linearization_level = 0
    if seconds is None:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = work
    else:
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = min(8, os.cpu_count() or 1)
        solver.parameters.subsolvers.extend(["no_lp", "default_lp"])
    callback = _Callback(improved) if improved else None
    status: list[Any] = []
    done = threading.Event()  # since an interrupted join() considers the thread ended

    def run() -> None:
        try:
            status.append(solver.solve(model.cp, callback))
        finally:
            done.set()

    thread = threading.Thread(target=run, name="autosched cp-sat")
    thread.start()
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:
            solver.stop_search()
    thread.join()
    return _answer(model, solver, solver.status_name(status[0]))


class _Callback(cp_model.CpSolverSolutionCallback):
    def __init__(self, improved: Callable[[float], None]):
        super().__init__()
        self.improved = improved

    def on_solution_callback(self) -> None:
        self.improved(self.objective_value)


def _answer(model: Model, solver: cp_model.CpSolver, status: str) -> Answer:
    if status not in ("OPTIMAL", "FEASIBLE"):
        bound = 0.0 if status != "UNKNOWN" else solver.best_objective_bound
        return Answer((), (), {}, math.inf, bound)
    value = solver.value
    chosen = (model.chosen[group].items() for group in model.problem.lists.group)
    device = [next(p for p, on in devices if value(on)) for devices in chosen]
    tasks = [(value(start), value(model.end[task])) for task, start in model.start.items()]
    sent = ((key, copy) for key, copy in model.copies.items() if value(copy.sent))
    copies = {key: (value(copy.start), value(copy.end)) for key, copy in sent}
    return Answer(device, tasks, copies, solver.objective_value, solver.best_objective_bound)
