"""Orders by name: those of papers, and the best that is found."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from autosched import ScheduleError
from autosched.parallel import controlled_memory, zero_bubbles
from autosched.parallel.order_search import improved
from autosched.parallel.orders import Action, Kind, Order, Rows, Seconds, Table, table_of
from autosched.parallel.zero_bubbles import Plan, filled


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
      ``"v-half"``, ``"v-min"``, ``"dualpipe-v"``; ``"best"`` takes the best of those that fit into
      ``memory``, and anneals it.
    * ``chunks``: the number of micro-batches.
    * ``seconds``: of F, I and W, forward and the gradients by input and by weights: those of a whole
      device for one micro-batch, or for each a list with those of each stage.
    * ``copy``: the seconds of a copy between two devices.
    * ``stages``: how many each device has, which ``"interleaved"`` and ``"best"`` leave open;
      default: 2 for ``"interleaved"`` and those in a V, else 1; ``"best"`` tries both.
    * ``memory``: of how many micro-batches a device may hold activations; default: as many as
      usual, which is p for ``"1f1b"``, ``"zb-h1"`` and ``"zb-v"`` on p devices, 2p for
      ``"zb-h2"``, and any number for ``"best"``.

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
    if not 0 <= copy < math.inf:
        raise ScheduleError(f"copy must be seconds, got {copy!r}")
    laps = [stages] if stages is not None else _laps(name, seconds, devices)
    layouts = [layout for count in laps for layout in _layouts(name, devices, count)]
    return order_of(name, layouts, chunks, seconds=seconds, copy=copy, memory=memory)


def order_of(
    name: str,
    layouts: Sequence[tuple[int, ...]],
    chunks: int,
    *,
    seconds: Seconds,
    copy: float,
    memory: float | None,
) -> Order:
    """Return the order of a name with the least bubble; ``layouts`` have the device of each stage."""
    found = []
    for places in layouts:
        devices = 1 + max(places)
        table = table_of(seconds, devices, len(places) // devices)
        rows = ORDERS[name].rows(Wanted(places, chunks, table, copy, memory))
        one = Order(name, rows, table, copy)
        found.append(improved(one, chunks if memory is None else memory) if name == BEST else one)
    best = min(found, key=Order.bubble)
    best.check_memory(memory)
    return best


def _layouts(name: str, devices: int, laps: int) -> list[tuple[int, ...]]:
    """Return the devices of stages with which an order is possible; for the best, all."""
    names = ORDERS if name == BEST else [name]
    found = (ORDERS[n].places(devices, laps) for n in names if ORDERS[n].can_have(laps))
    return list(dict.fromkeys(found))


def _laps(name: str, seconds: Seconds, devices: int) -> Sequence[int]:
    """Return the numbers of stages per device to try: by the seconds of stages, or the usual ones."""
    given = {len(each) for each in seconds if isinstance(each, Sequence)}
    if ORDERS[name].is_free and len(given) == 1 and not min(given) % devices and min(given):
        return [min(given) // devices]
    return ORDERS[name].laps


def check_order(name: str, stages: int | None, memory: float | None) -> None:
    """Raise ScheduleError for an unknown order, or one that cannot have so many stages."""
    if name not in ORDERS:
        raise ScheduleError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {name!r}")
    found = ORDERS[name]
    if stages is not None and not found.can_have(stages):
        allowed = "1 or more" if found.is_free else f"{found.laps[0]}"
        raise ScheduleError(f"stages= of order {name!r} must be {allowed}, got {stages!r}")
    if memory is not None and not (isinstance(memory, int | float) and memory >= 1):
        raise ScheduleError(f"memory= must be 1 micro-batch or more, got {memory!r}")


class Wanted(NamedTuple):
    """What is to be ordered."""

    places: tuple[int, ...]  # the device of each stage
    chunks: int
    table: Table
    copy: float
    memory: float | None

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 + max(self.places)

    @property
    def laps(self) -> int:
        """The number of stages per device."""
        return len(self.places) // self.devices


class Named(NamedTuple):
    """How orders of a name are made, and from what.

    ``laps`` are the usual numbers of stages per device;
    ``is_free`` if there may be any number. ``is_v``: whether two stages per device form a V.
    ``splits_backward``: whether gradients by input and by weights are apart.
    """

    rows: Callable[[Wanted], Rows]
    laps: Sequence[int] = (1,)
    is_free: bool = False
    is_v: bool = False
    splits_backward: bool = False

    def can_have(self, stages: int) -> bool:
        """Return whether each device can have so many stages."""
        is_number = isinstance(stages, int) and stages >= 1
        return is_number and (self.is_free or stages in self.laps)

    def places(self, devices: int, laps: int | None = None) -> tuple[int, ...]:
        """Return the device of each stage: cyclic, or in a V."""
        laps = self.laps[0] if laps is None else laps
        if laps == 2 and self.is_v:
            return (*range(devices), *reversed(range(devices)))
        return tuple(range(devices)) * laps


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


def _filling(plan: Plan, memory: Callable[[int], float], laps: int) -> Named:
    """Return an order made from a plan; ``memory`` is the usual limit for so many devices."""

    def rows(wanted: Wanted) -> Rows:
        most = memory(wanted.devices)
        less = None if wanted.memory is None else _filled(plan, wanted, min(most, wanted.memory))
        found = less or _filled(plan, wanted, most)
        assert found is not None, f"{wanted.devices} devices and {wanted.chunks} micro-batches"
        return found

    return Named(rows, [laps], is_v=laps == 2, splits_backward=True)


@lru_cache(maxsize=4)  # orders that are limited to the same memory are the same
def _filled(plan: Plan, wanted: Wanted, memory: float) -> Rows | None:
    return filled(plan, wanted.places, wanted.chunks, wanted.table, wanted.copy, memory)


def _repeated(pattern: controlled_memory.Pattern, memory: Callable[[int], int]) -> Named:
    """Return an order that repeats a pattern; ``memory`` is what it needs on so many devices."""

    def rows(wanted: Wanted) -> Rows:
        p = wanted.devices
        return controlled_memory.repeated(pattern, p, wanted.chunks, 2 * memory(p))

    return Named(rows, [2], is_v=True, splits_backward=True)


def _best(wanted: Wanted) -> Rows:
    """Return the best of all orders that fit, which is annealed later."""
    memory = wanted.chunks if wanted.memory is None else min(wanted.memory, wanted.chunks)
    wanted = wanted._replace(memory=memory)
    found = [
        named.rows(wanted)
        for name, named in ORDERS.items()
        if name != BEST
        and named.can_have(wanted.laps)
        and named.places(wanted.devices, wanted.laps) == wanted.places
    ]
    found.append(_serial(wanted.places, wanted.chunks))
    is_v = wanted.places[-1] == 0
    if wanted.laps == 1 or (wanted.laps == 2 and is_v):
        plan = zero_bubbles.line if wanted.laps == 1 else zero_bubbles.v_shape
        more = _filled(plan, wanted, memory)
        found += [] if more is None else [more]
    orders = [Order(BEST, rows, wanted.table, wanted.copy).split() for rows in found]
    fitting = [one for one in orders if max(one.peak()) <= memory]
    return min(fitting, key=Order.bubble).rows


def _serial(places: Sequence[int], chunks: int) -> Rows:
    """Return one micro-batch after another."""
    stages = range(len(places))
    kinds: list[tuple[Kind, Sequence[int]]] = [("F", stages), ("I", stages[::-1])]
    kinds.append(("W", stages))
    return tuple(
        tuple(
            Action(stage, kind, chunk)
            for chunk in range(chunks)
            for kind, each in kinds
            for stage in each
            if places[stage] == rank
        )
        for rank in range(1 + max(places))
    )


BEST = "best"
ORDERS: Mapping[str, Named] = {
    "gpipe": Named(lambda w: gpipe(w.devices, w.chunks)),
    "1f1b": Named(lambda w: interleaved(w.devices, w.chunks)),
    "interleaved": Named(lambda w: interleaved(w.devices, w.chunks, w.laps), [2], is_free=True),
    "zb-h1": _filling(zero_bubbles.line, lambda p: p, 1),
    "zb-h2": _filling(zero_bubbles.line, lambda p: 2 * p, 1),
    "zb-v": _filling(zero_bubbles.v_shape, lambda p: p, 2),
    "v-half": _repeated(controlled_memory.half, lambda p: p // 2 + 1),
    "v-min": _repeated(controlled_memory.least, lambda p: (p + 4) // 3),
    "dualpipe-v": Named(
        lambda w: dualpipe_v(w.devices, w.chunks), [2], is_v=True, splits_backward=True
    ),
    BEST: Named(_best, [2, 1], is_free=True, is_v=True, splits_backward=True),
}
