r"""autosched: a step of tensor work, written once in serial order, scheduled for all the devices there are.

::

                           Costs   Machine
                              \     /
     Graph ---- policy ----> Placement ---- lowering ----> Program --+-- execute --> outputs
     what                    where, in      streams, copies, one     +-- simulate -> Timeline -> viz
                             which order    events, frees    list    +-- verify ---> nothing, or ProgramError

Write a ``Graph``, choose a ``Machine``, and call what ``schedule(graph, machine)`` returns.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosched import viz as viz
from autosched.bounds import bounds
from autosched.compare import compare
from autosched.comparison import Comparison
from autosched.costs import Costs, Work
from autosched.errors import (
    AutoschedError,
    CaptureError,
    GradientError,
    GraphError,
    HazardError,
    MachineError,
    ProgramError,
    RunTimeoutError,
    ScheduleError,
    TaskError,
)
from autosched.graph import Graph, Here, Task, Value
from autosched.grouping import merge
from autosched.machine import Device, Link, Machine
from autosched.marked import task
from autosched.placement import Placement
from autosched.planning import schedule
from autosched.policies import in_order
from autosched.policies.possible import Possible
from autosched.program import Program
from autosched.schedule import Schedule, load
from autosched.simulate import simulate
from autosched.timeline import Timeline
from autosched.verify import verify

if TYPE_CHECKING:
    from autosched import parallel as parallel
    from autosched import testing as testing
    from autosched.compiled import compile
    from autosched.dynamo import TorchBackend
    from autosched.frontends.capture import capture
    from autosched.frontends.guards import Watch
else:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what needs torch when it is asked for: planning does not."""
        if name in ("parallel", "testing"):
            return import_module(f"autosched.{name}")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LAZY = {
    "TorchBackend": "autosched.dynamo",
    "Watch": "autosched.frontends.guards",
    "capture": "autosched.frontends.capture",
    "compile": "autosched.compiled",
}


__version__ = "0.1.0"

__all__ = [
    "AutoschedError",
    "CaptureError",
    "Comparison",
    "Costs",
    "Device",
    "GradientError",
    "Graph",
    "GraphError",
    "HazardError",
    "Here",
    "Link",
    "Machine",
    "MachineError",
    "Placement",
    "Possible",
    "Program",
    "ProgramError",
    "RunTimeoutError",
    "Schedule",
    "ScheduleError",
    "Task",
    "TaskError",
    "Timeline",
    "TorchBackend",
    "Value",
    "Watch",
    "Work",
    "bounds",
    "capture",
    "compare",
    "compile",
    "in_order",
    "load",
    "merge",
    "schedule",
    "simulate",
    "task",
    "verify",
]
