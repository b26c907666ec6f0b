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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autosched.policies.constraint_programming.integer_times import IntegerTimes, Moment, Times

__all__ = ["Alike", "Answer", "Copy", "Limits", "Model", "solve"]

_Literal = Any  # a Boolean variable or its negation


class Copy(NamedTuple):
    """Variables: whether a datum is copied to a device, its start and its end."""

    datum: int
    device: int
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
        self.copies: dict[tuple[int, int], Copy] = {}  # by datum and device
        # By copy stream: the intervals of copies that occupy it.
        self.streams: dict[tuple[str, int], list[Any]] = {}
        self._tasks()
        self._compute()
        self._dependencies()
        if integer.contended:
            self._copies()
        self.cp.minimize(self.makespan)

    def on(self, task: int, device: int) -> _Literal:
        """Return whether a task runs on a device."""
        return self.chosen[self.problem.lists.group[task]].get(device, self.false)

    def devices(self, value: Callable[[Any], int], tasks: Mapping[int, Moment]) -> dict[int, int]:
        """Return the device of each task in a solution."""
        group = self.problem.lists.group
        return {
            task: next(p for p, on in self.chosen[group[task]].items() if value(on))
            for task in tasks
        }

    def hint(self, device: Sequence[int], times: Times) -> None:
        """Give the solver an initial solution."""
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
            running = [
                model.new_optional_interval_var(
                    self.start[task], integer.seconds[task][p], self.end[task], self.on(task, p), ""
                )
                for task in tasks
            ]
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
            for (q, p), number in between.items():
                if number is None:
                    self.cp.add_bool_or(~self.on(maker, q), ~self.on(task, p))
            for seconds in sorted({number for number in between.values() if number}):
                self._far(maker, task, seconds)

    def _far(self, maker: int, task: int, seconds: int) -> None:
        """Add the delay of a task after a producer, unless their devices are closer."""
        far = self.cp.new_bool_var("")
        between = self.integer.apart[maker, task]
        self.cp.add(self.start[task] >= self.end[maker] + seconds).only_enforce_if(far)
        for p in self.integer.devices[task]:
            nearer = [
                q for q in self.integer.devices[maker] if (between.get((q, p), 0) or 0) < seconds
            ]
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
        """Add the duration of a copy from each possible source, and its streams."""
        model = self.cp
        maker = self.problem.lists.maker[datum]
        sources = [(q, row) for q, row in self.integer.sources[datum] if q != p]
        ways: list[_Literal] = []
        for q, row in sources:
            seconds = self.integer.copy(datum, row, p)
            if seconds is None:
                continue
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


class Alike:
    """The constraints for devices that are interchangeable: a capacity instead of devices.

    Devices are assigned in the end, which is always possible: each task gets one that is free when
    it starts.
    """

    def __init__(self, integer: IntegerTimes, least: int, most: int):
        self.integer, self.cp = integer, cp_model.CpModel()
        self.makespan = self.cp.new_int_var(least, most, "makespan")
        self.copies: dict[tuple[int, int], Copy] = {}
        self.start: dict[int, Any] = {}
        self.end: dict[int, Any] = {}
        for task, row in enumerate(integer.seconds):
            start = self._start(task, most)
            self.start[task] = start
            self.end[task] = start + row[0]
            self.cp.add(start + row[0] + integer.tails[task][0] <= self.makespan)
            for maker in integer.problem.before[task]:
                self.cp.add(start >= self.end[maker])
        running = [
            self.cp.new_fixed_size_interval_var(self.start[t], r[0], "")
            for t, r in enumerate(integer.seconds)
        ]
        self.cp.add_cumulative(running, [1] * len(running), sum(integer.problem.lists.streams))
        self.cp.minimize(self.makespan)

    def hint(self, device: Sequence[int], times: Times) -> None:
        """Give the solver an initial solution."""
        for task, start in self.start.items():
            if self.integer.seconds[task][0]:
                self.cp.add_hint(start, times.tasks[task][0])
        self.cp.add_hint(self.makespan, times.makespan)

    def _start(self, task: int, most: int) -> Any:
        """Return when a task starts.

        One of duration 0 must be first or last, where some device is free.
        """
        integer = self.integer
        if integer.seconds[task][0]:
            return self.cp.new_int_var(
                integer.heads[task][0], most - integer.tails[task][0] - integer.seconds[task][0], ""
            )
        return self.makespan if integer.problem.before[task] else self.cp.new_constant(0)

    def devices(self, value: Callable[[Any], int], tasks: Mapping[int, Moment]) -> dict[int, int]:
        """Assign to each task, in order of start, the stream that became free last."""
        free = [
            (0, p)
            for p, count in enumerate(self.integer.problem.lists.streams)
            for _ in range(count)
        ]
        found = {}
        for task in sorted(tasks, key=lambda task: (*tasks[task], task)):
            start, end = tasks[task]
            stream = max(
                (s for s in range(len(free)) if free[s][0] <= start), key=lambda s: free[s][0]
            )
            found[task] = free[stream][1]
            free[stream] = end, free[stream][1]
        return found


class Answer(NamedTuple):
    """The result of a solver: devices and times of the best solution, if any, and a lower bound."""

    device: dict[int, int] | None  # by task
    tasks: dict[int, Moment]
    copies: dict[tuple[int, int], Moment]  # by datum and device
    makespan: float
    bound: float
    interrupted: bool


class Limits(NamedTuple):
    """A limit of the solver in seconds, or in deterministic, hence reproducible, work."""

    seconds: float | None
    work: float
    seed: int = 0


def solve(
    model: Model | Alike, limits: Limits, improved: Callable[[float], None] | None = None
) -> Answer:
    """Run the solver in a thread, so that ctrl-C stops it with the best solution so far.

    ``improved`` is called with each better makespan.
    """
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
        if isinstance(model, Alike):
            # Four strategies together find more than any two of them, even on two cores.
            solver.parameters.num_workers = max(4, solver.parameters.num_workers)
        else:
            solver.parameters.subsolvers.extend(["no_lp", "default_lp"])
    callback = _Callback(improved) if improved else None
    status: list[Any] = []
    done = threading.Event()  # since an interrupted join() considers the thread ended

    def work() -> None:
        try:
            status.append(solver.solve(model.cp, callback))
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


class _Callback(cp_model.CpSolverSolutionCallback):
    def __init__(self, improved: Callable[[float], None]):
        super().__init__()
        self.improved = improved

    def on_solution_callback(self) -> None:
        self.improved(self.objective_value)


def _answer(
    model: Model | Alike, solver: cp_model.CpSolver, status: str, interrupted: bool
) -> Answer:
    if status not in ("OPTIMAL", "FEASIBLE"):
        bound = 0.0 if status != "UNKNOWN" else solver.best_objective_bound
        return Answer(None, {}, {}, math.inf, bound, interrupted)
    value = solver.value
    tasks = {task: (value(model.start[task]), value(model.end[task])) for task in model.start}
    copies = {
        key: (value(copy.start), value(copy.end))
        for key, copy in model.copies.items()
        if value(copy.sent)
    }
    device = model.devices(value, tasks)
    return Answer(
        device, tasks, copies, solver.objective_value, solver.best_objective_bound, interrupted
    )
