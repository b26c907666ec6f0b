"""Model: a problem as constraints for CP-SAT, the solver of OR-Tools. Says what a program can do, and decides nothing.

Each task has a start, an end and a device. Where copies occupy nothing, a task starts behind what it reads by as much
as the copy takes. Else each copy that some choice of devices needs has a start and an end too, and stands on the
streams that it holds. Tasks on one compute stream do not overlap; of several a device works on as many at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autosched.policies.whole import Moment, Times, Whole

__all__ = ["Answer", "Copy", "Limits", "Model", "Part", "solve"]

_Literal = Any  # a Boolean variable or its negation


class Copy(NamedTuple):
    """Variables: whether a datum is sent to a device, from when and until when."""

    datum: int
    device: int
    sent: _Literal
    start: Any
    end: Any


class Part(NamedTuple):
    """Which tasks to place anew, where they may go, and what stands before and behind them, by device."""

    devices: Mapping[int, Sequence[int]]  # by task
    heads: Mapping[int, Sequence[int]]
    tails: Mapping[int, Sequence[int]]

    @classmethod
    def all(cls, whole: Whole) -> Part:
        """Return all tasks."""
        return cls(*(dict(enumerate(table)) for table in (whole.devices, whole.heads, whole.tails)))


class Model:
    """The constraints, and the variables that say who runs where and when."""

    def __init__(self, whole: Whole, least: int, most: int, part: Part | None = None):
        self.whole, self.problem = whole, whole.problem
        self.part = part or Part.all(whole)
        self.most = most
        self.cp = cp_model.CpModel()
        self.false, self.true = self.cp.new_constant(0), self.cp.new_constant(1)
        self.makespan = self.cp.new_int_var(least, most, "makespan")
        self.chosen: dict[int, dict[int, _Literal]] = {}  # by group: whether it is on a device
        self.start: dict[int, Any] = {}  # by task
        self.end: dict[int, Any] = {}
        self.position: list[Any] = []  # in the order of issue, where it counts
        self.copies: dict[tuple[int, int], Copy] = {}  # by datum and device
        self.streams: dict[tuple[str, int], list[Any]] = {}  # of copies: the intervals that hold them
        self._tasks()
        self._compute()
        self._dependencies()
        if whole.contended:
            self._copies()
        self.cp.minimize(self.makespan)

    def on(self, task: int, device: int) -> _Literal:
        """Return whether a task runs on a device."""
        return self.chosen[self.problem.group[task]].get(device, self.false)

    def hint(self, device: Sequence[int], times: Times) -> None:
        """Tell the solver where to begin."""
        model = self.cp
        for group, chosen in self.chosen.items():
            for p, here in chosen.items():
                model.add_hint(here, p == device[group])
        for task in self.start:
            model.add_hint(self.start[task], times.tasks[task][0])
            model.add_hint(self.end[task], times.tasks[task][1])
        for key, (_, _, sent, start, end) in self.copies.items():
            model.add_hint(sent, key in times.copies)
            if key in times.copies:
                model.add_hint(start, times.copies[key][0])
                model.add_hint(end, times.copies[key][1])
        model.add_hint(self.makespan, times.makespan)

    def _tasks(self) -> None:
        """Add where tasks run and when, not too early and not too late."""
        model = self.cp
        for task, devices in self.part.devices.items():
            group = self.problem.group[task]
            if group not in self.chosen:
                self.chosen[group] = {p: model.new_bool_var("") for p in devices}
                model.add_exactly_one(self.chosen[group].values())
            head, tail = self.part.heads[task], self.part.tails[task]
            first, last = min(head[p] for p in devices), min(tail[p] for p in devices)
            start, end = model.new_int_var(first, self.most, ""), model.new_int_var(first, self.most - last, "")
            for p in devices:
                model.add(start >= head[p]).only_enforce_if(self.on(task, p))
                model.add(end + tail[p] <= self.makespan).only_enforce_if(self.on(task, p))
            self.start[task], self.end[task] = start, end

    def _compute(self) -> None:
        """Add what compute streams can do: so many tasks at a time, and no more than all the time."""
        model, whole = self.cp, self.whole
        for p, count in enumerate(self.problem.streams):
            tasks = [task for task, devices in self.part.devices.items() if p in devices]
            running = [
                model.new_optional_interval_var(
                    self.start[task], whole.seconds[task][p], self.end[task], self.on(task, p), ""
                )
                for task in tasks
            ]
            if count == 1:
                model.add_no_overlap(running)
            else:
                model.add_cumulative(running, [1] * len(running), count)
            model.add(sum(whole.seconds[task][p] * self.on(task, p) for task in tasks) <= count * self.makespan)

    def _dependencies(self) -> None:
        """Add what is behind what, and how far behind where data travels between."""
        for task in self.start:
            for maker in self.problem.before[task]:
                if maker in self.start:
                    self.cp.add(self.start[task] >= self.end[maker])
        for (maker, task), between in self.whole.apart.items():
            if maker not in self.start or task not in self.start:
                continue
            for (q, p), number in between.items():
                if number is None:
                    self.cp.add_bool_or(~self.on(maker, q), ~self.on(task, p))
            for seconds in sorted({number for number in between.values() if number}):
                self._far(maker, task, seconds)

    def _far(self, maker: int, task: int, seconds: int) -> None:
        """Add that a task starts so long after a maker, unless they are on devices that are nearer."""
        far, between = self.cp.new_bool_var(""), self.whole.apart[maker, task]
        self.cp.add(self.start[task] >= self.end[maker] + seconds).only_enforce_if(far)
        for p in self.part.devices[task]:
            nearer = [q for q in self.part.devices[maker] if (between.get((q, p), 0) or 0) < seconds]
            self.cp.add_bool_or(~self.on(task, p), far, *(self.on(maker, q) for q in nearer))
            for q in nearer:
                self.cp.add_bool_or(~self.on(task, p), ~far, ~self.on(maker, q))

    def _copies(self) -> None:
        """Add copies, each once for each datum and device that needs it, on the streams that they hold."""
        readers: dict[tuple[int, int], list[int]] = {}
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                for p in self.whole.devices[task]:
                    readers.setdefault((datum, p), []).append(task)
        for datum, p in dict.fromkeys([*readers, *self.problem.returns]):
            if any(q != p for q, _ in self.whole.sources[datum]):
                self._copy(datum, p, readers.get((datum, p), []))
        for intervals in self.streams.values():
            self.cp.add_no_overlap(intervals)

    def _copy(self, datum: int, p: int, readers: Sequence[int]) -> None:
        """Add the copy of a datum to a device."""
        model, maker, back = self.cp, self.problem.data.maker[datum], (datum, p) in self.problem.returns
        here = self.on(maker, p) if maker >= 0 else self.false
        sent, start = model.new_bool_var(""), model.new_int_var(0, self.most, "")
        end = model.new_int_var(0, self.most, "")
        self.copies[datum, p] = Copy(datum, p, sent, start, end)
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
        """Add how long a copy takes from wherever it comes, and put it on its streams."""
        model, maker = self.cp, self.problem.data.maker[datum]
        sources = [(q, row) for q, row in self.whole.sources[datum] if q != p]
        ways: list[_Literal] = []
        for q, row in sources:
            seconds = self.whole.copy(datum, row, p)
            if seconds is None:
                continue
            way = sent if len(sources) == 1 else model.new_bool_var("")
            ways.append(way)
            if len(sources) > 1:
                model.add_bool_or(~sent, ~self.on(maker, q), way)
                model.add_implication(way, self.on(maker, q))
            interval = model.new_optional_interval_var(start, seconds, end, way, "")
            path = self.problem.paths[row][p]
            if path.holds_out:
                self.streams.setdefault(("out", q), []).append(interval)
            if path.holds_in:
                self.streams.setdefault(("in", p), []).append(interval)
        model.add(sum(ways) == sent)


class Answer(NamedTuple):
    """What a solver found: devices and moments of the best, None if nothing; and the least makespan there can be."""

    device: dict[int, int] | None  # by task
    order: list[int]
    tasks: dict[int, Moment]
    bound: float
    interrupted: bool


class Limits(NamedTuple):
    """How long a solver works: so many seconds, or else so much work, which is the same each time."""

    seconds: float | None
    work: float
    seed: int = 0


def solve(model: Model, limits: Limits, improved: Callable[[float], None] | None = None) -> Answer:
    """Solve in a thread of its own, so that ctrl-C ends it with the best so far; ``improved`` gets each makespan."""
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = limits.seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.linearization_level = 0
    if limits.seconds is None:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = limits.work
    else:
        solver.parameters.max_time_in_seconds = limits.seconds
        solver.parameters.num_workers = min(8, os.cpu_count() or 1)
        solver.parameters.subsolvers.extend(["no_lp", "default_lp"])
    told = _Told(improved) if improved else None
    status: list[Any] = []
    done = threading.Event()  # for join() takes a thread for ended when it is interrupted

    def work() -> None:
        try:
            status.append(solver.solve(model.cp, told))
        finally:
            done.set()

    thread = threading.Thread(target=work, name="autosched cp-sat")
    thread.start()
    interrupted = False
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:
            interrupted = True
            solver.stop_search()
    thread.join()
    return _answer(model, solver, solver.status_name(status[0]), interrupted)


class _Told(cp_model.CpSolverSolutionCallback):
    def __init__(self, improved: Callable[[float], None]):
        super().__init__()
        self.improved = improved

    def on_solution_callback(self) -> None:
        self.improved(self.objective_value)


def _answer(model: Model, solver: cp_model.CpSolver, status: str, interrupted: bool) -> Answer:
    """Read what was found."""
    if status not in ("OPTIMAL", "FEASIBLE"):
        return Answer(None, [], {}, 0.0 if status != "UNKNOWN" else solver.best_objective_bound, interrupted)
    group, value = model.problem.group, solver.value
    device = {task: next(p for p, on in model.chosen[group[task]].items() if value(on)) for task in model.start}
    tasks = {task: (value(model.start[task]), value(model.end[task])) for task in model.start}
    places = list(map(value, model.position))
    return Answer(device, _in_order(tasks, places), tasks, solver.best_objective_bound, interrupted)


def _in_order(tasks: Mapping[int, Moment], places: Sequence[int]) -> list[int]:
    """Return tasks by their place, if they have one, or by their end, which is when what they make can leave."""
    if places:
        return sorted(tasks, key=places.__getitem__)
    return sorted(tasks, key=lambda task: (tasks[task][1], tasks[task][0], task))
