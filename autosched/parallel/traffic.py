"""Estimate the time of tasks that only read and write memory.

All tasks of communication are of this kind. Knows rates, no task.
"""

from __future__ import annotations

from autosched import Machine

__all__ = ["memory_seconds"]


def memory_seconds(
    machine: Machine, device: str, nbytes: float, launches: float = 1
) -> dict[str, float]:
    """Return, by device, the seconds of a task that reads and writes this many bytes with this many launches.

    Raises MachineError for a device that the machine does not have.

    >>> machine = Machine.emulated(gpus=1)  # a GPU moves 1e12 bytes per second, and takes 5e-6 seconds to launch
    >>> memory_seconds(machine, "cuda:0", 1e9, launches=2)
    {'cuda:0': 0.00101}
    """
    found = machine.device(device)
    return {device: launches * found.launch_seconds + nbytes / found.bytes_per_second}
