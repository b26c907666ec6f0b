"""Measuring: what tasks cost on the devices that are here, how fast links are, what several streams of a device give.

    stopwatch   how long a call keeps a device, and the thread that launches it
    shapes      which calls do the same work, so that one of them is measured
    walking     a serial run on one device, in which another decides how tasks are called
    bench       such runs on one of some equal devices, in which calls are timed; what is believed of it
    tasks       costs of a graph, of what was timed on each bench
    links       rate and latency of links, of copies of many sizes
    probes      whether streams of a device run side by side
    machines    a machine with links and streams as measured
    sanity      which readings cannot be
    kept        what was measured before, in a file
    emulating   how much slower an emulated machine must be for this CPU
    accuracy    a prediction beside what happened

Nothing is modelled here, and no policy is known: what was not measured is left as it was.
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
