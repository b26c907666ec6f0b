"""Print the progress of planning or compiling as a line on stderr.

The line shows how far it is, and of planning the best makespan so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autosched._lib.text import duration

_WIDTH = 30  # columns


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """Yield a function that shows the part done, 0 to 1, and the best makespan, if given.

    Then clear the line.

    >>> with progress_bar("planning") as show:
    ...     show(0.5, 0.002)  # planning [###############               ]  50%, best 2 ms
    """
    shown = ""

    def show(part: float, makespan: float | None = None) -> None:
        nonlocal shown
        best = "" if makespan is None else f", best {duration(makespan)}"
        line = f"{what} [{'#' * int(part * _WIDTH):{_WIDTH}}] {part:4.0%}{best}"
        if line != shown:  # or planning would wait for the terminal
            shown = line
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
