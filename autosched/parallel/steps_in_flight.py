"""Submit training steps, so that one begins while the step before it goes on.

Steps write parameters and the optimizer's state in place. So the program of a step is a loop: a
step reads a parameter when the step before it has updated it, while its batch is on the way
already. The steps that are under way have one plan and the same tensors, except for the batch. A
step begins when those before it have ended if it has another plan, such as for another learning
rate, or if they put new tensors into the optimizer, such as the first moments.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from autosched import RunTimeoutError, Schedule
from autosched._lib.fetching import fetched_ahead

__all__ = ["UnderWay", "done", "holding", "results"]

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
        self._is_lost = False  # whether a step may be under way that has no future here

    @property
    def is_idle(self) -> bool:
        """Whether all steps have ended, and none failed unnoticed."""
        return not self._futures and not self._is_lost

    def submit(
        self,
        plan: Any,
        schedule: Schedule,
        inputs: dict[str, torch.Tensor],
        finish: Callable[[Mapping[str, Any]], Any],
    ) -> Future[Any]:
        """Start a step; return its future, with the result of ``finish``."""
        self.plan = plan
        self._schedule = schedule
        try:
            with torch.no_grad():  # gradients are taken inside
                future = schedule.submit_for(inputs, finish)
            self._futures.append(future)
        except BaseException:
            self.lose(schedule)  # an interrupt may have come after the start
            raise
        return future

    def lose(self, schedule: Schedule) -> None:
        """Note that a step without a future has failed, or was aborted and may still end."""
        self._schedule = schedule
        self._is_lost = True

    def look(self) -> bool:
        """Return whether a step failed; forget those that have ended otherwise."""
        ended = [future for future in self._futures if future.done()]
        if any(future.exception() is not None for future in ended):
            return True
        self._futures = [future for future in self._futures if future not in ended]
        return self._is_lost

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all steps have ended; return whether one failed.

        Raises RunTimeoutError if that takes longer.
        """
        if self._schedule is None or self.is_idle:
            return False
        self._schedule.wait(timeout)
        failed = self._is_lost or any(future.exception() is not None for future in self._futures)
        self._futures = []
        self._is_lost = False
        return failed


def results(
    submit: Callable[..., Any], call: Callable[..., Any], batches: Iterable[Any], most: int
) -> Iterator[Any]:
    """Yield the results of steps on batches, in order; at most so many are under way.

    If that is one, a step begins when its result is asked for. A thread fetches the next batch.
    """
    if most == 1:
        for batch in fetched_ahead(batches, _FETCHED, tuple):
            yield call(*batch)
        return
    for future in fetched_ahead(batches, most, lambda batch: submit(*batch)):
        yield future.result()


@contextlib.contextmanager
def holding(guard: Any, timeout: float | None) -> Iterator[float | None]:
    """Hold a lock; yield how many seconds are left.

    Raises RunTimeoutError if another thread holds it for longer.
    """
    begin = time.perf_counter()
    patience = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
    if not guard.acquire(timeout=patience):
        raise RunTimeoutError("another thread goes on submitting or planning a step")
    try:
        yield None if timeout is None else max(0.0, begin + timeout - time.perf_counter())
    finally:
        guard.release()


def done(call: Callable[..., Any], batch: Iterable[Any]) -> Future[Any]:
    """Return the future of a call that has ended."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*batch))
    except Exception as error:
        future.set_exception(error)
    return future
