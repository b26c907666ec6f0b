"""Learn at once that another rank has failed, or has gone.

A rank that computes, or waits for a rank that is alive, would not notice. So each has a receive open
from every other, in a group of its own, and a thread that waits for it. What arrives is news of a
failure, or of a rank that hangs, or the farewell of a rank whose program ends; a broken connection is
that of a rank that was killed. Beyond 64 ranks each watches its two neighbours, and news is passed on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from autosched.runtime.ranks.wire import lose

__all__ = ["Watch"]

_FAREWELL = -1  # lower numbers tell of a rank that hangs
_ALL = 64  # ranks, each of which watches all others
_SILENT = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH
_PATIENCE = 1.0  # seconds for the threads to end
_MOMENT = timedelta(milliseconds=50)  # for a farewell, whose receive is posted already


class Watch:
    """Threads that wait for news of other ranks.

    ``failed`` is called with the number that a rank told, ``gone`` with a rank whose connection
    broke, ``left`` with one that said farewell, and ``hangs`` with one of which another rank tells.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        failed: Callable[[int], None],
        gone: Callable[[int], None],
        left: Callable[[int], None],
        hangs: Callable[[int], None],
    ):
        self.group = group
        self.rank = rank
        self.size = size
        self.failed = failed
        self.gone = gone
        self.left = left
        self.hangs = hangs
        self.is_closed = False
        near = range(size) if size <= _ALL else {(rank + 1) % size, (rank - 1) % size}
        self.others = [other for other in near if other != rank]
        self.threads = [
            threading.Thread(target=self._serve, args=(other,), daemon=True, name=f"watch {other}")
            for other in self.others
        ]
        for thread in self.threads:
            thread.start()

    def tell(self, number: int) -> None:
        """Tell others of a failure."""
        for other in self.others:
            with contextlib.suppress(RuntimeError):
                self.group.send([torch.tensor([number])], other, 0)

    def tell_hangs(self, rank: int) -> None:
        """Tell others of a rank that hangs."""
        self.tell(_FAREWELL - 1 - rank)

    def close(self) -> None:
        """Say farewell, and end the threads."""
        self.is_closed = True
        for other in self.others:
            with contextlib.suppress(RuntimeError):
                self.group.send([torch.tensor([_FAREWELL])], other, 0).wait(_MOMENT)
        lose(self.group, self.rank, self.size)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)

    def _serve(self, other: int) -> None:
        while True:
            news = torch.zeros(1, dtype=torch.int64)
            try:
                self.group.recv([news], other, 0).wait()
            except RuntimeError as error:
                if not self.is_closed:
                    (self.hangs if _is_silent(error) else self.gone)(other)
                return
            if int(news) == _FAREWELL:
                self.left(other)
                return
            if int(news) < _FAREWELL:
                self.hangs(_FAREWELL - 1 - int(news))
            else:
                self.failed(int(news))


def _is_silent(error: RuntimeError) -> bool:
    """Whether a connection broke because the other host did not acknowledge what was sent."""
    return any(os.strerror(number) in str(error) for number in _SILENT)
