"""What happens on simulated GPUs, told to whoever wants to know.

``Hardware.observer`` is told of each event in the order in which the host issues them. The observer
here ignores all. Observers choose nothing: they only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autosched.simulated_gpus.hardware import Block
    from autosched.simulated_gpus.queues import Capture, Mark, Queue

Tensors = Sequence[torch.Tensor]


class Observer:
    """Ignores everything."""

    def launched(self, queue: Queue, what: str, reads: Tensors, writes: Tensors) -> None:
        """Work was put on a queue, or captured; tensors of the host are page-locked."""

    def recorded(self, queue: Queue, mark: Mark) -> None:
        """A queue was marked, for an event or for another queue."""

    def waited(self, queue: Queue, mark: Mark | None, event: Any, asked: bool) -> None:
        """A queue was told to wait; ``asked``: by the user, and not by a copy between devices."""

    def host_waited(self, mark: Mark, asked: bool) -> None:
        """The host has waited, or has seen that a mark is past."""

    def host_waited_for_device(self, device: int, asked: bool) -> None:
        """The host has waited for all queues of a device."""

    def allocated(self, block: Block) -> None:
        """Memory was handed out."""

    def freed(self, block: Block) -> None:
        """Nothing refers to a block any more."""

    def called_on_host(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator is called on tensors of the host."""

    def replayed(self, capture: Capture, queue: Queue) -> None:
        """A captured graph was put on a queue."""

    def refused(self, why: str) -> None:
        """A capture does not permit what was asked."""

    def entered(self, stream: Any) -> None:
        """A stream became current."""

    def numbers_read(self, what: str) -> None:
        """The host asks for numbers, which are not computed."""

    def noted(self, what: str) -> None:
        """Something is not as on a GPU."""
