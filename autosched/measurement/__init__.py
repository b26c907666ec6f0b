"""Measured costs of tasks, and rates of links.

    hardware    torch devices and their models
    stopwatch   seconds that a call takes on a device, and in the thread that launches it
    tasks       costs of a graph, from timed calls in serial runs on one device of each model
    machines    a machine with measured links, storage and times of issuing

Nothing is modelled here, and no policy is used: what was not measured remains unchanged.
"""

from __future__ import annotations

from autosched.measurement.machines import measure_machine, measure_storage, measured_links
from autosched.measurement.tasks import measure_costs

__all__ = ["measure_costs", "measure_machine", "measure_storage", "measured_links"]
