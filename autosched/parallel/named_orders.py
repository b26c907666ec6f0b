"""Orders by name: those of papers, and the best that is found."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from autosched import ScheduleError
from autosched.parallel import zero_bubbles
from autosched.parallel.orders import Action, Kind, Order, Rows, Seconds, Table, table_of
from autosched.parallel.zero_bubbles import Filling, filled


def order(
    name: str,
    devices: int,
    chunks: int,
    *,
    seconds: Seconds = (1.0, 1.0, 1.0),
    copy: float = 0.0,
    stages: int | None = None,
    memory: float | None = None,
) -> Order:
    """Return what each device of a pipeline does, one action after another.

    * ``name``: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"zb-v"``,
      ``"v-half"``, ``"v-min"``, ``"dualpipe-v"``.
    * ``chunks``: the number of micro-batches.
    * ``seconds``: of F, I and W, forward and the gradients by input and by weights: those of a whole
      device for one micro-batch, or for each a list with those of each stage.
    * ``copy``: the seconds of a copy between two devices.
    * ``stages``: how many each device has; default: 1, or 2 for ``"interleaved"`` and those in a V.
    * ``memory``: of how many micro-batches a device may hold activations; default: as many as
      usual, which is p for ``"1f1b"``, ``"zb-h1"`` and ``"zb-v"`` on p devices, and 2p for
      ``"zb-h2"``.

    Raises ScheduleError for invalid arguments, and for an order that needs more memory.

    >>> order("zb-v", 2, 2)
    0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    >>> [round(order(name, 8, 24).bubble(), 3) for name in ("1f1b", "zb-h1", "zb-v")]
    [0.226, 0.089, 0.0]
    """
    for what, number in (("devices", devices), ("chunks", chunks)):
        if not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{what} must be a number of 1 or more, got {number!r}")
    check_order(name, stages, memory)
    laps = ORDERS[name].laps if stages is None else stages
    if not 0 <= copy < math.inf:
        raise ScheduleError(f"copy must be seconds, got {copy!r}")
    wanted = Wanted(devices, chunks, laps, table_of(seconds, devices, laps), copy, memory)
    made = Order(name, ORDERS[name].rows(wanted), wanted.table, copy)
    made.check_memory(memory)
    return made


def check_order(name: str, stages: int | None, memory: float | None) -> None:
    """Raise ScheduleError for an unknown order, or one that cannot have so many stages."""
    if name not in ORDERS:
        raise ScheduleError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {name!r}")
    found = ORDERS[name]
    if stages is not None and not found.can_have(stages):
        allowed = "1 or more" if found.is_free else f"{found.laps}"
        raise ScheduleError(f"stages= of order {name!r} must be {allowed}, got {stages!r}")
    if memory is not None and not (isinstance(memory, int | float) and memory >= 1):
        raise ScheduleError(f"memory= must be 1 micro-batch or more, got {memory!r}")


class Wanted(NamedTuple):
    """What is to be ordered; ``laps`` is the number of stages per device."""

    devices: int
    chunks: int
    laps: int
    table: Table
    copy: float
    memory: float | None


class Named(NamedTuple):
    """How rows are made, and from what.

    ``laps`` is the usual number of stages per device; it ``is_free`` if that may be any.
    ``splits_backward``: whether gradients by input and by weights are apart.
    """

    rows: Callable[[Wanted], Rows]
    laps: int = 1
    is_free: bool = False
    splits_backward: bool = False

    def can_have(self, stages: int) -> bool:
        """Return whether each device can have so many stages."""
        is_number = isinstance(stages, int) and stages >= 1
        return is_number and (self.is_free or stages == self.laps)

    def places(self, devices: int, laps: int | None = None) -> tuple[int, ...]:
        """Return the device of each stage: cyclic, or in a V."""
        laps = self.laps if laps is None else laps
        if self.is_free or laps == 1:
            return tuple(range(devices)) * laps
        return (*range(devices), *reversed(range(devices)))


# ---- orders that do not depend on seconds


def _row(stage: int, kind: Kind, chunks: int) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, chunk) for chunk in range(chunks))


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Return some forwards, then forwards and backwards alternately, then the other backwards."""
    pairs = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    cool_down = backwards[max(0, len(forwards) - warm_up) :]
    return (*forwards[:warm_up], *pairs, *cool_down)


def gpipe(devices: int, chunks: int) -> Rows:
    """Return all forwards, then all backwards.

    Huang et al., "GPipe", NeurIPS 2019, arXiv 1811.06965. A device holds the activations of all m
    micro-batches. Bubble, for equal stages without copies: (p-1) / (m+p-1).
    """
    return tuple((*_row(rank, "F", chunks), *_row(rank, "B", chunks)) for rank in range(devices))


def interleaved(devices: int, chunks: int, stages: int = 1) -> Rows:
    """Return 1F1B: each backward as early as possible, over v stages per device.

    PipeDream-Flush: Narayanan et al., ICML 2021, arXiv 2006.09503; interleaved in Megatron-LM:
    Narayanan et al., SC 2021, arXiv 2104.04473. Stage s is on device s mod p. Micro-batches visit a
    device's stages in groups of p; beyond the paper, where m is no multiple of p, in groups of
    nearly equal size, none below p. With g in the first group, device r holds the activations of at
    most 2(p-r-1) + (v-1)g + 1 stages; of p-r with one stage per device. Bubble: (p-1) / (vm+p-1)
    where m >= p or v = 1.
    """
    count = max(1, chunks // devices)
    # Larger groups first, or devices would wait for each other.
    sizes = [chunks // count + (group < chunks % count) for group in range(count)]
    ends = accumulate(sizes)
    groups = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    turns = [(lap, chunk) for group in groups for lap in range(stages) for chunk in group]

    def row(rank: int) -> tuple[Action, ...]:
        own = range(rank, devices * stages, devices)
        forwards = [Action(own[lap], "F", chunk) for lap, chunk in turns]
        backwards = [Action(own[-1 - lap], "B", chunk) for lap, chunk in turns]
        ahead = devices - rank - 1
        warm_up = ahead if stages == 1 else 2 * ahead + (stages - 1) * sizes[0]
        return _alternating(forwards, backwards, warm_up)

    return tuple(map(row, range(devices)))


def dualpipe_v(devices: int, chunks: int) -> Rows:
    """Return an order of pairs: a forward and a backward of another micro-batch.

    DualPipe: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, arXiv 2412.19437, in its form of a V
    with stages s and 2p-1-s on device s. A device holds the activations of at most 2p+1 stages.
    """
    return tuple(_dualpipe_row(rank, devices, chunks) for rank in range(devices))


def _dualpipe_row(rank: int, devices: int, chunks: int) -> tuple[Action, ...]:
    enough = max(chunks, 2 * devices)  # to fill the pipeline; surplus is dropped at the end
    after = devices - rank - 1
    half = (rank + 1) // 2
    turns = [  # capitals: of the first stage; "w": of the I that waits longest
        *["F"] * 2 * after,
        *["Ff"] * (rank + 1),
        *["iwf"] * after,
        *["FbfB"] * (enough - 2 * devices + rank + 1),
        *["bfB"] * after,
        *["bB"] * half,
        "bI" if rank % 2 == 0 else "iI",
        *["iI"] * (rank - half),
        *["wI"] * after,
        *["w"] * (rank + 1),
    ]
    found: list[Action] = []
    late: deque[Action] = deque()
    done: Counter[tuple[int, bool]] = Counter()
    for letter in chain.from_iterable(turns):
        if letter == "w":
            found.append(late.popleft())
            continue
        stage = rank if letter.isupper() else 2 * devices - 1 - rank
        kind: Kind = letter.upper()  # type: ignore[assignment]
        found.append(Action(stage, kind, done[stage, kind == "F"]))
        done[stage, kind == "F"] += 1
        if kind == "I":
            late.append(found[-1]._replace(kind="W"))
    return tuple(action for action in found if action.chunk < chunks)


# ---- orders with gradients by weights where they fit


def _filling(plan: Callable[[Filling], bool], memory: Callable[[int], float], laps: int) -> Named:
    """Return an order made from a plan; ``memory`` is the usual limit for so many devices."""

    def rows(wanted: Wanted) -> Rows:
        places, most = made.places(wanted.devices), memory(wanted.devices)
        how = plan, places, wanted.chunks, wanted.table, wanted.copy
        less = None if wanted.memory is None else filled(*how, min(most, wanted.memory))
        found = less or filled(*how, most)
        assert found is not None, f"{wanted.devices} devices and {wanted.chunks} micro-batches"
        return found

    made = Named(rows, laps, splits_backward=True)
    return made


ORDERS: Mapping[str, Named] = {
    "gpipe": Named(lambda wanted: gpipe(wanted.devices, wanted.chunks)),
    "1f1b": Named(lambda wanted: interleaved(wanted.devices, wanted.chunks)),
    "interleaved": Named(lambda w: interleaved(w.devices, w.chunks, w.laps), 2, is_free=True),
    "zb-h1": _filling(zero_bubbles.line, lambda p: p, 1),
    "zb-h2": _filling(zero_bubbles.line, lambda p: 2 * p, 1),
    "zb-v": _filling(zero_bubbles.v_shape, lambda p: p, 2),
    "v-half": _filling(zero_bubbles.repeated(zero_bubbles.half), lambda p: p // 2 + 1, 2),
    "v-min": _filling(zero_bubbles.repeated(zero_bubbles.least), lambda p: (p + 4) // 3, 2),
    "dualpipe-v": Named(lambda w: dualpipe_v(w.devices, w.chunks), 2, splits_backward=True),
}
