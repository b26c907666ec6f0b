"""Add up the work of the parts of merged tasks."""

from __future__ import annotations

from autosched.costs.costs import Costs, Work
from autosched.graph.graph import Task

__all__ = ["work_of"]


def work_of(task: Task, costs: Costs) -> Work | None:
    """Return the work of a task and its parts; None if unknown."""
    if not task.parts:
        return Work(0, 0, 0) if task.view else costs.work.get(task.name)
    total = Work(0, 0, 0)
    for part in task.parts:
        work = work_of(part, costs)
        if work is None:
            return None
        launches = total.launches + work.launches
        total = Work(total.flops + work.flops, total.nbytes + work.nbytes, launches)
    return total
