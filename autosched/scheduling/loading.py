"""Read saved schedules."""

from __future__ import annotations

import os
from pathlib import Path

from autosched.errors import AutoschedError, ScheduleError
from autosched.graph.graph import Graph
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.rebuilding import rebuilt
from autosched.scheduling.saved import from_text
from autosched.scheduling.schedule import Schedule, joined

__all__ = ["load"]


def load(path: str | os.PathLike[str], graph: Graph | None = None) -> Schedule:
    """Read a saved schedule for the same graph built again, and verify it again.

    ``Schedule.save`` wrote the file. Tasks run the functions of ``graph``: the file holds no
    functions and no tensors. Without a graph the schedule can be inspected and simulated, not run.
    Raises ScheduleError for a malformed file, for a different graph, for a schedule that cannot be
    loaded without its graph, and for parts that do not fit together; OSError for a file that cannot
    be read.

    >>> import autosched as asc, tempfile
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), seconds=1e-5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asc.schedule(graph, asc.Machine.emulated(gpus=1)).save(f"{folder}/plan.json")
    ...     asc.load(f"{folder}/plan.json", graph)
    <Schedule of 'graph': 1 tasks, 1 instructions on 1 streams, 1e-05 s predicted>
    """
    if graph is not None:
        check_arguments(graph=graph)
    data = Path(path).read_bytes()
    try:
        saved = from_text(data.decode())
        return joined(*((saved, graph) if graph is not None else rebuilt(saved)))
    except (AutoschedError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{os.fspath(path)}: {error}") from error
