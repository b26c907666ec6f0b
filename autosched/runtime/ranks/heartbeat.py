"""Notice a rank that does not answer: its process is stopped or frozen, or its host is lost.

The connections of such a rank stay open, so nothing else tells. Each rank asks the one before it,
and is asked by the one after it. A question is a receive, and its answer a send that waits for it:
gloo's own thread matches them. So a rank answers while its tasks compute, however long, and while
Python is busy or holds its lock.

Silence counts only while this process runs: after both have been stopped, or on a machine with too
much to do, nobody is blamed. A process on the same host that a signal has stopped is seen sooner,
and without doubt, since the system says so.

A host that is lost is seen sooner, too: the kernel there acknowledges each question, whatever its
processes do. Where nothing is acknowledged for a while, though it was sent several times, the kernel
here closes the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autosched._lib.processes import sockets

__all__ = ["Heartbeat", "acknowledged"]

_TAG = 1  # in the group of the watch
_AHEAD = 64  # answers that wait for a question
_QUESTIONS = 4  # at least, in the time after which a silent rank is given up
_APART = 0.25  # seconds between two questions at most: a lost host is noticed by the next one
_LOST = 8  # a lost host is given up this many times sooner than a silent process
_SENT_AGAIN = 1.0  # seconds for TCP to send a lost question again, two times or more
_TICK = 0.2  # seconds between two looks
_STOPPED = 0.3  # seconds for which a process must be seen stopped: a signal may come to all in turn


@contextlib.contextmanager
def acknowledged(limit: float | None) -> Iterator[None]:
    """Let connections that are made meanwhile break when the other host is lost.

    ``limit`` is that of a silent rank; none breaks, if that is None, or on another system than Linux.
    """
    before = sockets()
    yield
    if limit is None:
        return
    milliseconds = int(1000 * max(_SENT_AGAIN, limit / _LOST))
    for number, _ in sockets() - before:
        # Some are no connections, or have been closed.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class Heartbeat:
    """Threads that ask the rank before this one, and answer the one after it.

    A rank is given up that is silent for ``limit`` seconds; none is, if that is None. ``is_stopped``
    tells whether the process of rank ``beside`` is stopped. ``silent`` is called with a rank, once.
    Threads end when the group is lost, after ``close``.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        limit: float | None,
        silent: Callable[[int], None],
        beside: int,
        is_stopped: Callable[[], bool],
    ):
        self.group = group
        self.asked = (rank - 1) % size
        self.asks = (rank + 1) % size
        self.beside = beside
        self.is_stopped = is_stopped
        self.silent = silent
        self.silence = 0.0  # seconds since the question that is not answered yet
        self.is_waiting = False
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []
        if size > 1:
            self._start("answer", self._answer)
            if limit is not None:
                self._start("ask", self._ask, limit)
                self._start("check", self._check, limit)

    def close(self) -> None:
        """Ask nothing more."""
        self.closed.set()

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True, name=f"heartbeat {name}")
        self.threads.append(thread)
        thread.start()

    def _answer(self) -> None:
        """Have answers ready until the group is lost."""
        word = [torch.zeros(1, dtype=torch.uint8)]
        with contextlib.suppress(RuntimeError):
            ready = deque(self.group.send(word, self.asks, _TAG) for _ in range(_AHEAD))
            while True:
                ready.popleft().wait()
                ready.append(self.group.send(word, self.asks, _TAG))

    def _ask(self, limit: float) -> None:
        """Ask again and again until the group is lost."""
        word = [torch.zeros(1, dtype=torch.uint8)]
        with contextlib.suppress(RuntimeError):
            while not self.closed.wait(min(_APART, limit / _QUESTIONS)):
                self.silence = 0.0
                self.is_waiting = True
                self.group.recv(word, self.asked, _TAG).wait()
                self.is_waiting = False

    def _check(self, limit: float) -> None:
        """Give up a rank that is silent or stopped for too long."""
        tick = min(_TICK, limit / _QUESTIONS)
        stopped = 0.0
        last = time.monotonic()
        while not self.closed.wait(tick):
            now = time.monotonic()
            # At least; if more time has passed, this process was kept from running.
            ran = min(now - last, 2 * tick)
            last = now
            stopped = stopped + ran if self.is_stopped() else 0.0
            if self.is_waiting:
                self.silence += ran
            if stopped > _STOPPED:
                self.silent(self.beside)
                return
            if self.silence > limit and self.is_waiting:
                self.silent(self.asked)
                return
