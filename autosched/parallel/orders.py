"""Orders of pipelines: what each device does, one action after another.

A model is cut into stages; each device has one or several. An action is the forward of a stage for
one micro-batch, or its backward, whole or in two parts: the gradient by the input, which the
previous stage waits for, and the gradient by the weights, which no stage waits for. Below, p is the
number of devices, m the number of micro-batches ("chunks"), v the number of stages per device. A
*bubble* is the share of time in which the busiest device is idle.

A pipeline is a policy, not a graph: the order says which action a device runs first, and the graph
is the same for all orders. This module knows neither torch nor machines.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple

from autosched import ScheduleError
from autosched._lib.files import write
from autosched._lib.text import duration
from autosched.viz import svg
from autosched.viz.drawing import save_picture
from autosched.viz.gantt import ticks

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "I", "W")
Seconds = Sequence[float | Sequence[float]]  # of F, I and W
Table = tuple[tuple[float, ...], ...]  # seconds by kind (F, I, W) and stage


class Action(NamedTuple):
    """F: forward, B: whole backward, I: gradient by the input, W: gradient by the weights.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: Kind
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.chunk}"


Rows = tuple[tuple[Action, ...], ...]  # by device
# What an action holds after it, in halves of a stage's activations: I releases one half, as in Qi
# et al., "Zero bubble", arXiv 2401.10241.
HELD: Mapping[str, int] = {"F": 2, "B": -2, "I": -1, "W": -1}


@dataclass(frozen=True)
class Order:
    """What each device of a pipeline does: ``rows`` of actions, by device.

    ``print`` it to see them. ``table`` has the seconds of stages for which it was made, by kind (F,
    I, W), ``copy`` those of a copy between devices. Raises ScheduleError unless each stage is on one
    device, with one forward and one backward for each micro-batch, and no device waits forever.

    >>> from autosched.parallel import order
    >>> order("1f1b", 2, 3)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """

    name: str
    rows: Rows
    table: Table
    copy: float = 0.0

    def __post_init__(self) -> None:
        _check(self.name, self.rows)
        _ = self._own_starts  # which is refused where devices wait for each other

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage.

        >>> from autosched.parallel import order
        >>> order("interleaved", 2, 1).devices, order("zb-v", 2, 1).devices
        ((0, 1, 0, 1), (0, 1, 1, 0))
        """
        found = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        return tuple(found[stage] for stage in range(len(found)))

    @cached_property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return 1 + max(action.chunk for action in self.rows[0])

    @cached_property
    def splits_backward(self) -> bool:
        """Whether a backward has two parts."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def split(self) -> Order:
        """Return the order with the two parts of each backward, one after the other."""
        if not any(action.kind == "B" for row in self.rows for action in row):
            return self
        rows = tuple(tuple(chain.from_iterable(map(_parts, row))) for row in self.rows)
        return replace(self, rows=rows)

    def first(self, chunks: int) -> Order:
        """Return the order of the first micro-batches alone."""
        rows = (tuple(action for action in row if action.chunk < chunks) for row in self.rows)
        return replace(self, rows=tuple(rows))

    def bubble(self, seconds: Seconds | None = None, copy: float | None = None) -> float:
        """Return the share of time in which the busiest device is idle.

        Time is that of the device that takes longest, from its first start to its last end; others
        may begin the next step meanwhile. Arguments are those of ``order``; default: those that it
        was made for.

        >>> from autosched.parallel import order
        >>> order("1f1b", 4, 9).bubble()
        0.25
        """
        table = self._table(seconds)
        starts = self.starts(seconds, copy)
        longest = max(
            starts[row[-1]] + _seconds(table, row[-1]) - starts[row[0]] for row in self.rows
        )
        work = max(sum(_seconds(table, action) for action in row) for row in self.rows)
        return max(longest - work, 0.0) / longest if longest else 0.0

    def starts(
        self, seconds: Seconds | None = None, copy: float | None = None
    ) -> dict[Action, float]:
        """Return when each action starts, in seconds. Arguments as of ``bubble``."""
        if seconds is None and copy is None:
            return dict(self._own_starts)
        return self._starts(self._table(seconds), self.copy if copy is None else copy)

    def peak(self) -> tuple[float, ...]:
        """Return how many micro-batches' activations each device holds at most.

        A forward takes those of its stage, of which the gradient by the input releases a half, and
        the gradient by the weights the other.

        >>> from autosched.parallel import order
        >>> order("gpipe", 2, 6).peak(), order("1f1b", 2, 6).peak()
        ((6.0, 6.0), (2.0, 1.0))
        """
        laps = Counter(self.devices)
        return tuple(
            max(accumulate(HELD[action.kind] for action in row)) / (2 * laps[rank])
            for rank, row in enumerate(self.rows)
        )

    def draw(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draw the actions of each device in time, by suffix: .svg, .png or .pdf (extra ``viz``).

        Boxes have the number of the micro-batch. The title says the bubble and the memory, unless
        given. Raises ChartError for other suffixes, and OSError.
        """
        if title is None:
            what = f"bubble {self.bubble():.1%}, at most {max(self.peak()):g} micro-batches"
            title = f"{self.name}: {what}"
        save_picture(path, svg=partial(_picture, self, title))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV of ``torch.distributed.pipelining``: a line per device, computations alone.

        Its schedules read that with ``_load_csv(path)``, and add the communication.
        """
        lines = [",".join(map(str, row)) for row in self.rows]
        write(path, "\n".join([*lines, ""]))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        seconds: Seconds = (1.0, 1.0, 1.0),
        copy: float = 0.0,
    ) -> Order:
        """Read the CSV of ``torch.distributed.pipelining``, with or without communication.

        Communication is left out; of pairs of a forward and a backward the forward comes first.
        ``seconds`` and ``copy`` are those of ``order``. Raises ScheduleError for text that is none,
        and OSError.
        """
        lines = Path(path).read_text().splitlines()
        rows = tuple(tuple(_read(line, path)) for line in lines if line.strip(", "))
        stages = len({action.stage for row in rows for action in row})
        if not rows or stages % len(rows):
            raise ScheduleError(f"{str(path)!r} has {stages} stages for {len(rows)} devices")
        table = table_of(seconds, len(rows), stages // len(rows))
        return cls(Path(path).stem, rows, table, copy)

    def check_memory(self, memory: float | None) -> None:
        """Raise ScheduleError where a device holds more than ``memory``, in micro-batches."""
        most = max(self.peak())
        if memory is not None and most > memory + 1e-9:
            raise ScheduleError(
                f"order {self.name!r} holds activations of {most:g} micro-batches on a device, more "
                f"than memory={memory:g}"
            )

    def __repr__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @cached_property
    def _own_starts(self) -> dict[Action, float]:
        return self._starts(self.table, self.copy)

    def _table(self, seconds: Seconds | None) -> Table:
        laps = len(self.devices) // len(self.rows)
        return self.table if seconds is None else table_of(seconds, len(self.rows), laps)

    def _starts(self, table: Table, copy: float) -> dict[Action, float]:
        run = Simulation(self.devices, table, copy)
        left = [deque(row) for row in self.rows]
        before = -1
        while before < len(run.starts):
            before = len(run.starts)
            for row in left:
                while row and (arrival := run.arrival(row[0])) is not None:
                    run.run(row.popleft(), arrival)
        for rank, row in enumerate(left):
            if row:
                missing = next(key for key in run.needed(row[0]) if key not in run.ends)
                raise ScheduleError(
                    f"order {self.name!r}: device {rank} waits forever in {row[0]} for "
                    f"{missing[1]} of stage {missing[0]} and micro-batch {missing[2]}"
                )
        return run.starts


class Simulation:
    """Actions of devices, one after another: when each starts and ends."""

    def __init__(self, devices: Sequence[int], table: Table, copy: float):
        self.devices = devices  # of each stage
        self.starts: dict[Action, float] = {}
        self.ends: dict[tuple[int, str, int], float] = {}  # of a stage, F, I or W, and micro-batch
        self.free = [0.0] * (1 + max(devices))
        self.table = table
        self._copy = copy

    def arrival(self, action: Action) -> float | None:
        """Return when an action could start if its device were free; None if not known."""
        rank = self.devices[action.stage]
        found = 0.0
        for key in self.needed(action):
            end = self.ends.get(key)
            if end is None:
                return None
            found = max(found, end + self._copy if self.devices[key[0]] != rank else end)
        return found

    def run(self, action: Action, arrival: float) -> None:
        """Run an action when its device is free, not before ``arrival``."""
        stage, kind, chunk = action
        rank = self.devices[stage]
        self.starts[action] = start = max(self.free[rank], arrival)
        self.free[rank] = start + _seconds(self.table, action)
        self.ends[stage, "I" if kind == "B" else kind, chunk] = self.free[rank]

    def needed(self, action: Action) -> list[tuple[int, str, int]]:
        """Return what an action waits for: stages, kinds (backward is I) and micro-batches."""
        stage, kind, chunk = action
        if kind == "F":
            return [(stage - 1, "F", chunk)] if stage else []
        if kind == "W":
            return [(stage, "I", chunk)]
        is_last = stage + 1 == len(self.devices)
        return [(stage, "F", chunk), *([] if is_last else [(stage + 1, "I", chunk)])]


_CELL = re.compile(r"(\d+)(F|B|I|W|UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB])(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def _read(line: str, path: str | os.PathLike[str]) -> Iterator[Action]:
    """Yield the actions of a line of a CSV."""
    for cell in line.split(","):
        pair = _PAIR.fullmatch(cell.strip())
        for word in filter(None, (pair[1] if pair else cell).strip().split(";")):
            found = _CELL.fullmatch(word.strip())
            if found is None or (found[2] in HELD and not found[3]):
                raise ScheduleError(
                    f"{str(path)!r} has {word!r}, which is no action such as 2F0: a stage, F, B, I or W, "
                    f"and a micro-batch"
                )
            if found[2] in HELD:
                yield Action(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]


def _parts(action: Action) -> tuple[Action, ...]:
    """Return an action, or the two parts of a backward."""
    stage, kind, chunk = action
    if kind != "B":
        return (action,)
    return Action(stage, "I", chunk), Action(stage, "W", chunk)


def _seconds(table: Table, action: Action) -> float:
    stage = action.stage
    if action.kind == "B":
        return table[1][stage] + table[2][stage]
    return table[KINDS.index(action.kind)][stage]


def _check(name: str, rows: Rows) -> None:
    """Raise ScheduleError unless each stage is complete, and on one device."""
    actions = Counter(chain.from_iterable(rows))
    where: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"order {name!r}: device {rank} has no action")
        for action in row:
            if where.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"order {name!r}: stage {action.stage} is on devices {where[action.stage]} and "
                    f"{rank}"
                )
    stages = 1 + max((action.stage for action in actions), default=-1)
    chunks = 1 + max((action.chunk for action in actions), default=-1)
    for stage in range(stages):
        for chunk in range(chunks):
            f, b, i, w = (actions[stage, kind, chunk] for kind in ("F", "B", "I", "W"))  # type: ignore[index]
            if (f, b, i, w) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                raise ScheduleError(
                    f"order {name!r}: stage {stage} must have one F, and one B or one I and one W, for "
                    f"micro-batch {chunk}; it has {f} F, {b} B, {i} I, {w} W"
                )


def table_of(seconds: Seconds, devices: int, stages: int) -> Table:
    """Return seconds by kind and stage: those of a device are divided among its stages.

    Raises ScheduleError for anything but three finite numbers, or three lists with one per stage.
    """
    count = devices * stages
    message = (
        f"seconds must be those of F, I and W: three numbers, or three lists of {count}, one for "
        f"each stage; got {seconds!r}"
    )
    try:
        found = tuple(
            tuple(map(float, each))
            if isinstance(each, Sequence)
            else (float(each) / stages,) * count
            for each in seconds
        )
    except (TypeError, ValueError):
        raise ScheduleError(message) from None
    numbers = list(chain.from_iterable(found))
    if [*map(len, found)] != [count] * 3 or not all(0 <= n < math.inf for n in numbers):
        raise ScheduleError(message)
    return found


# ---- the picture, as papers draw it

_MARGIN, _WIDTH = 20.0, 1000.0
_HEIGHT = 18.0  # of an action
_LOOKS: Mapping[str, tuple[str, str]] = {
    "F": ("task", "F: forward"),
    "B": ("backward", "B: backward"),
    "I": ("backward", "I: gradient by the input"),
    "W": ("optimizer", "W: gradient by the weights"),
}


def _picture(order: Order, title: str) -> str:
    """Return a row of boxes for each device; every second stage of a device is paler."""
    starts, count = order.starts(), len(order.rows)
    end = max(starts[row[-1]] + _seconds(order.table, row[-1]) for row in order.rows)
    left = _MARGIN + svg.text_width(f"device {count - 1}") + 12
    right = _WIDTH - _MARGIN
    scale = (right - left) / (end or 1.0)
    top = _MARGIN + 34
    bottom = top + count * (_HEIGHT + 4)
    name = svg.shorten(title, right - _MARGIN, svg.TITLE)
    body = [svg.text("ink title", _MARGIN, _MARGIN + 14, name)]
    for seconds, label in ticks(end, 8):
        body.append(svg.path("grid", "M", left + seconds * scale, top - 4, "V", bottom))
        body.append(svg.text("muted middle", left + seconds * scale, bottom + 14, label))
    for rank, row in enumerate(order.rows):
        y = top + rank * (_HEIGHT + 4)
        body.append(svg.text("ink", _MARGIN, y + 13, f"device {rank}"))
        body.append(svg.rect("track", left, y, right - left, _HEIGHT))
        for action in row:
            taken = _seconds(order.table, action)
            x, width = left + starts[action] * scale, taken * scale
            what = f"{action}: stage {action.stage}, micro-batch {action.chunk}"
            tooltip = f"{what}\nstart {duration(starts[action])}, takes {duration(taken)}"
            odd = bool(action.stage // count % 2)
            cls = _LOOKS[action.kind][0] + " odd" * odd + " thin" * (width < 4)
            body.append(svg.rect(cls, x, y, width, _HEIGHT, 0, tooltip))
            if svg.text_width(str(action.chunk), svg.LABEL) + 2 <= width:
                ink = "ink middle label" if odd else "on-task middle label"
                body.append(svg.text(ink, x + width / 2, y + 13, str(action.chunk)))
    kinds = {action.kind for row in order.rows for action in row}
    legend = [("box", *look) for kind, look in _LOOKS.items() if kind in kinds]
    if len(order.devices) > count:
        legend.append(("box", "task odd", "every second stage of a device"))
    body += svg.legend(_MARGIN, bottom + 40, legend)
    return svg.document(_WIDTH, bottom + 60, title, body)
