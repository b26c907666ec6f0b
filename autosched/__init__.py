r"""autosched: a step of tensor work, written once in serial order, scheduled for all the devices there are.

::

                           Costs   Machine
                              \     /
     Graph ---- policy ----> Placement ---- lowering ----> Program --+-- execute --> outputs
     what                    where, in      streams, copies, one     +-- simulate -> Timeline -> viz
                             which order    events, frees    list    +-- verify ---> nothing, or ProgramError

Write a ``Graph``, choose a ``Machine``, and call what ``schedule(graph, machine)`` returns.
"""

from autosched import viz as viz
from autosched.bounds import bounds
from autosched.costs import Costs
from autosched.errors import (
    AutoschedError,
    GraphError,
    HazardError,
    MachineError,
    ProgramError,
    RunTimeoutError,
    ScheduleError,
    TaskError,
)
from autosched.graph import Graph, Task, Value
from autosched.machine import Device, Link, Machine
from autosched.placement import Placement
from autosched.program import Program
from autosched.schedule import Schedule, load, schedule
from autosched.simulate import simulate
from autosched.timeline import Timeline
from autosched.verify import verify

__version__ = "0.1.0"

__all__ = [
    "AutoschedError",
    "Costs",
    "Device",
    "Graph",
    "GraphError",
    "HazardError",
    "Link",
    "Machine",
    "MachineError",
    "Placement",
    "Program",
    "ProgramError",
    "RunTimeoutError",
    "Schedule",
    "ScheduleError",
    "Task",
    "TaskError",
    "Timeline",
    "Value",
    "bounds",
    "load",
    "schedule",
    "simulate",
    "verify",
]
