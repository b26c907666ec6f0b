r"""Schedule a step of tensor work, written once in serial order, on several devices.

::

     Graph, Machine, Costs ---> Problem --- policy ---> Placement
                                    |                       |
                                    +------- lower ---------+
                                               |
                                            Program --+-- execute --> outputs
                                                      +-- simulate -> Timeline -> viz
                                                      +-- verify ---> ProgramError?

Write a ``Graph``, choose a ``Machine``, and call what ``schedule(graph, machine)`` returns.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosched import viz as viz
from autosched.bounds import bounds
from autosched.coarsening import merge
from autosched.comparison import Comparison, compare
from autosched.costs.costs import Costs, Replay, Work
from autosched.errors import (
    AutoschedError,
    CaptureError,
    GradientError,
    GraphError,
    HazardError,
    MachineError,
    ProgramError,
    RankError,
    RunTimeoutError,
    ScheduleError,
    StorageError,
    TaskError,
)
from autosched.graph.graph import Graph, Here, Task, Value
from autosched.graph.marked import task
from autosched.machine.machine import Device, Link, Machine, Network
from autosched.placement import Placement
from autosched.policies import in_order
from autosched.policies.base.possible import Possible
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule, load
from autosched.simulation.simulate import simulate
from autosched.timeline.timeline import Timeline
from autosched.verification.verify import verify

if TYPE_CHECKING:
    from autosched import parallel as parallel
    from autosched import testing as testing
    from autosched.frontends.capture import capture
    from autosched.frontends.compiled import compile
    from autosched.frontends.dynamo import TorchBackend
    from autosched.fusion import Frozen, fuse
    from autosched.measurement import measure_costs, measure_machine, measure_storage
    from autosched.sanitizer import Finding, Report, sanitize
else:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what needs torch when it is asked for: planning does not."""
        if name in ("parallel", "testing"):
            return import_module(f"autosched.{name}")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LAZY = {
    "Finding": "autosched.sanitizer.findings",
    "Report": "autosched.sanitizer.findings",
    "sanitize": "autosched.sanitizer",
    "Frozen": "autosched.fusion",
    "TorchBackend": "autosched.frontends.dynamo",
    "capture": "autosched.frontends.capture",
    "compile": "autosched.frontends.compiled",
    "fuse": "autosched.fusion",
    "measure_costs": "autosched.measurement",
    "measure_machine": "autosched.measurement",
    "measure_storage": "autosched.measurement",
}


def __dir__() -> list[str]:
    """List the public names: subpackages are not among them, but for those that users import."""
    return [*__all__, "parallel", "testing", "viz"]


__version__ = "0.1.0"

__all__ = [
    "AutoschedError",
    "CaptureError",
    "Comparison",
    "Costs",
    "Device",
    "Finding",
    "Frozen",
    "GradientError",
    "Graph",
    "GraphError",
    "HazardError",
    "Here",
    "Link",
    "Machine",
    "MachineError",
    "Network",
    "Placement",
    "Possible",
    "Problem",
    "Program",
    "ProgramError",
    "RankError",
    "Replay",
    "Report",
    "RunTimeoutError",
    "Schedule",
    "ScheduleError",
    "StorageError",
    "Task",
    "TaskError",
    "Timeline",
    "TorchBackend",
    "Value",
    "Work",
    "bounds",
    "capture",
    "compare",
    "compile",
    "fuse",
    "in_order",
    "load",
    "measure_costs",
    "measure_machine",
    "measure_storage",
    "merge",
    "sanitize",
    "schedule",
    "simulate",
    "task",
    "verify",
]
