"""How long the work of simulated GPUs takes, in seconds that are computed and not measured.

Each item costs the host some time to issue. A kernel starts when its queue is free and the host has
issued it, and takes a fixed time, or cycles of a clock. That is slow on a GPU that was idle and
rises while it is busy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from autosched.simulated_gpus.queues import Item, Queue


@dataclass
class Timing:
    """Seconds, and cycles per second, of the host and of devices."""

    issue: float = 5e-6
    kernel: float = 2e-6
    idle_rate: float = 345e6
    busy_rate: float = 1980e6
    ramp: float = 0.05  # seconds of work until the clock stands at its highest
    host: float = 0.0  # now
    busy: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by device

    def rate(self, device: int) -> float:
        """Return the cycles per second of a device's clock now."""
        share = min(1.0, self.busy[device] / self.ramp)
        return self.idle_rate + share * (self.busy_rate - self.idle_rate)

    def issued(self, cycles: int = 0, hidden: bool = False) -> float:
        """Let the host issue something; return when it has."""
        self.host += 0.0 if hidden else self.issue
        return self.host

    def take(self, queue: Queue, item: Item) -> None:
        """Move a queue's time to the end of an item."""
        begin = max(queue.seconds, item.issued)
        if item.work is not None and not item.hidden:
            begin += self.work(queue.device, item.cycles)
        elif item.what == "wait" and item.mark is not None:
            begin = max(begin, item.mark.seconds)
        queue.seconds = begin

    def work(self, device: int, cycles: int) -> float:
        """Let a device work; return for how long."""
        seconds = cycles / self.rate(device) if cycles else self.kernel
        self.busy[device] += seconds
        return seconds
