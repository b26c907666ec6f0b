"""Submit training steps, so that one begins while the step before it goes on.

Steps write parameters and the optimizer's state in place. So the program of a step is a loop: a
step reads a parameter when the step before it has updated it, while its batch is on the way
already. The steps that are under way have one plan and the same tensors, except for the batch. A
step begins when those before it have ended if it has another plan, such as for another learning
rate, or if they put new tensors into the optimizer, such as the first moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from autosched import Schedule
from autosched._lib.fetching import fetched_ahead

__all__ = ["UnderWay", "results"]

_FETCHED = 2  # batches: that of the present step, and the next one


class UnderWay:
    """The submitted steps of one plan: ``plan`` is None before the first one.

    ``inputs`` are those that are the same in each step.
    """

    def __init__(self) -> None:
        self.plan: Any = None
        self.inputs: Mapping[str, torch.Tensor] = {}
        self._schedule: Schedule | None = None
        self._futures: list[Future[Any]] = []

    @property
    def is_idle(self) -> bool:
        """Whether all steps have ended, and none failed unnoticed."""
        return not self._futures

    def submit(
        self,
        plan: Any,
        schedule: Schedule,
        inputs: dict[str, torch.Tensor],
        finish: Callable[[Mapping[str, Any]], Any],
    ) -> Future[Any]:
        """Start a step; return its future, with the result of ``finish``."""
        with torch.no_grad():  # gradients are taken inside
            future = schedule.submit_for(inputs, finish)
        self.plan = plan
        self._schedule = schedule
        self._futures.append(future)
        return future

    def look(self) -> bool:
        """Return whether a step failed; forget those that have ended otherwise."""
        ended = [future for future in self._futures if future.done()]
        if any(future.exception() is not None for future in ended):
            return True
        self._futures = [future for future in self._futures if future not in ended]
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all steps have ended; return whether one failed.

        Raises RunTimeoutError if that takes longer.
        """
        if self._schedule is None or not self._futures:
            return False
        self._schedule.wait(timeout)
        futures, self._futures = self._futures, []
        return any(future.exception() is not None for future in futures)


def results(
    submit: Callable[..., Any], call: Callable[..., Any], batches: Iterable[Any], most: int
) -> Iterator[Any]:
    """Yield the results of steps on batches, in order; at most so many are under way.

    If that is one, a step begins when its result is asked for. A thread fetches the next batch.
    """
    if most == 1:
        for batch in fetched_ahead(batches, _FETCHED):
            yield call(*batch)
        return
    for future in fetched_ahead((submit(*batch) for batch in batches), most):
        yield future.result()
