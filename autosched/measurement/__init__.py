"""Measured costs of tasks, rates of links, and numbers of streams.

    stopwatch   seconds that a call takes on a device, and in the thread that launches it
    shapes      which calls do the same work, so that only one of them is measured
    walking     a serial run on one device that lets its caller decide how tasks are called
    bench       timed calls in serial runs on one device of several equal ones
    tasks       costs of a graph from the measurements of each bench
    links       rate and latency of links, from copies of many sizes
    probes      whether streams of a device run concurrently
    machines    a machine with measured links and streams
    sanity      readings that are impossible
    kept        a file of earlier measurements
    emulating   how much slower an emulated machine must be for this CPU
    accuracy    predicted and measured time of a schedule

Nothing is modelled here, and no policy is used: what was not measured remains unchanged.
"""

from __future__ import annotations

from autosched.measurement.accuracy import Accuracy, accuracy
from autosched.measurement.emulating import keeping_up
from autosched.measurement.links import Way, measured_links, measured_ways
from autosched.measurement.machines import measure_machine
from autosched.measurement.probes import Sharing, sharing
from autosched.measurement.tasks import measure_costs

__all__ = [
    "Accuracy",
    "Sharing",
    "Way",
    "accuracy",
    "keeping_up",
    "measure_costs",
    "measure_machine",
    "measured_links",
    "measured_ways",
    "sharing",
]
