"""Print the progress of planning or compiling as a line on stderr.

The line shows how far it is, and of planning the best makespan so far.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
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


# Seconds to compile a region by Inductor, and more for each of its tasks: a first guess.
_PART, _ITEM = 2.0, 0.02
_PATIENCE = 2.0  # seconds of work that are not announced


@contextmanager
def counting(
    what: str, parts: str, sizes: Sequence[int], sooner: str
) -> Iterator[Callable[[], None]]:
    """Yield a function that says that one more of the parts is done, which have these sizes.

    The line has how many seconds the rest may take, and how it would end sooner. In a terminal it
    is cleared at the end.

    >>> with counting("fusing 'step'", "regions", [300, 80], "if the cache is kept") as done:
    ...     done()  # fusing 'step': 1 of 2 regions, about 4 s; ends sooner if the cache is kept
    """
    guesses = [_PART + _ITEM * size for size in sizes]
    begun, count = time.perf_counter(), 0
    in_terminal = sys.stderr.isatty()

    def show() -> None:
        done = sum(guesses[:count])
        speed = (time.perf_counter() - begun) / done if count else 1.0
        rest = sum(guesses[count:]) * speed
        if count >= len(sizes) or (not in_terminal and count) or rest < _PATIENCE:
            return
        line = f"{what}: {count} of {len(sizes)} {parts}, about {rest:.0f} s; ends sooner {sooner}"
        begin, end = ("\r", "\033[K") if in_terminal else ("", "\n")
        print(f"{begin}{line}{end}", end="", file=sys.stderr, flush=True)

    def done() -> None:
        nonlocal count
        count += 1
        show()

    try:
        show()
        yield done
    finally:
        if in_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
