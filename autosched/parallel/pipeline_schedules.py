"""Pipeline schedules: the order of micro-batches on each device.

A model is cut into stages; each device has one or several. An action is the forward of a stage for
one micro-batch, or its backward, whole or in two parts: the gradient by the input, which the
previous stage waits for, and the gradient by the weights, which no stage waits for. Below, p is the
number of devices, m the number of micro-batches ("chunks"), and a bubble is the share of time in
which devices are idle if copies take no time, stages are equally long, and a backward takes twice
as long as a forward.

A pipeline is a policy, not a graph: the schedule says which action a device runs first, and the
graph is the same for all schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


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


Order = tuple[tuple[Action, ...], ...]  # by device
_KINDS: tuple[Kind, ...] = ("F", "I", "W")


def gpipe(devices: int, chunks: int) -> Order:
    """Return all forwards, then all backwards.

    Huang et al., "GPipe", NeurIPS 2019, arXiv 1811.06965. A device holds the activations of all m
    micro-batches. Bubble: (p-1) / (m+p-1).

    >>> print(*gpipe(2, 2)[0])
    0F0 0F1 0B0 0B1
    """
    return tuple((*_row(rank, "F", chunks), *_row(rank, "B", chunks)) for rank in range(devices))


def one_f_one_b(devices: int, chunks: int) -> Order:
    """Return 1F1B: each backward as early as possible.

    PipeDream-Flush: Narayanan et al., ICML 2021, arXiv 2006.09503. Device r holds the activations
    of at most min(m, p-r) micro-batches. Bubble: that of GPipe, (p-1) / (m+p-1).

    >>> print(*one_f_one_b(2, 3)[0])
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    return tuple(
        _alternating(_row(rank, "F", chunks), _row(rank, "B", chunks), devices - rank - 1)
        for rank in range(devices)
    )


def interleaved(devices: int, chunks: int) -> Order:
    """Return 1F1B over two stages per device.

    Megatron-LM: Narayanan et al., SC 2021, arXiv 2104.04473. Stage s is on device s mod p.
    Micro-batches visit a device's stages in groups of p; beyond the paper, where m is no multiple
    of p, in groups of nearly equal size, none below p. With g in the first group, device r holds
    the activations of at most 2(p-r-1) + g + 1 stages. Bubble: (p-1) / (2m+p-1) where m >= p.

    >>> print(*interleaved(2, 2)[1])
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    count = max(1, chunks // devices)
    # Larger groups first, or devices would wait for each other.
    sizes = [chunks // count + (group < chunks % count) for group in range(count)]
    groups = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    turns = [(lap, chunk) for group in groups for lap in range(2) for chunk in group]

    def row(rank: int) -> tuple[Action, ...]:
        stages = (rank, devices + rank)
        forwards = [Action(stages[lap], "F", chunk) for lap, chunk in turns]
        backwards = [Action(stages[1 - lap], "B", chunk) for lap, chunk in turns]
        return _alternating(forwards, backwards, 2 * (devices - rank - 1) + sizes[0])

    return tuple(map(row, range(devices)))


def zero_bubble(
    devices: int,
    chunks: int,
    *,
    seconds: Mapping[Kind, Sequence[float]] | None = None,
    copy: float = 0.0,
) -> Order:
    """Return a schedule that fills bubbles with gradients by weights.

    ZB-V of Qi et al., "Zero bubble", arXiv 2401.10241. Stages form a V, with stages s and 2p-1-s on
    device s. Gradients by weights, W, fill the gaps, and come first where the memory limit is
    reached: a device holds at most 2p activations of stages, from F to W. Bubble: (p-1) / (6m+p-1)
    where F, I and W are equally long and m >= p.

    ``seconds`` has for each kind (F, I, W) those by stage, default 1; ``copy`` is the time of a
    copy between devices. Returns the fastest of several, with different thresholds for the size of
    a gap that gets a W.

    >>> print(*zero_bubble(2, 1)[1])
    1F0 2F0 2I0 1I0 2W0 1W0
    """
    if seconds is None:
        seconds = dict.fromkeys(_KINDS, [1.0] * 2 * devices)
    rows = tuple(_v_shaped(rank, devices, chunks) for rank in range(devices))
    filled = [_GapFilling(rows, seconds, copy, share).run() for share in (0.0, 0.5, 1.0)]
    return min(filled, key=lambda found: found[0])[1]


ORDERS: Mapping[str, Callable[[int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def stage_devices(order: Order) -> tuple[int, ...]:
    """Return the device of each stage.

    >>> stage_devices(interleaved(2, 1)), stage_devices(zero_bubble(2, 1))
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    found = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return tuple(found[stage] for stage in range(len(found)))


def _row(stage: int, kind: Kind, chunks: int) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, chunk) for chunk in range(chunks))


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Return some forwards, then forwards and backwards alternately, then the other backwards."""
    pairs = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    cool_down = backwards[max(0, len(forwards) - warm_up) :]
    return (*forwards[:warm_up], *pairs, *cool_down)


def _v_shaped(rank: int, devices: int, chunks: int) -> tuple[Action, ...]:
    """Return F and I of a device whose first stage is ``rank``, its second on the way back."""
    enough = max(chunks, 2 * devices - 1)  # to fill the pipeline; surplus is dropped at the end
    back = 2 * devices - 1 - rank
    f = iter(_row(rank, "F", enough))
    i = iter(_row(rank, "I", enough))
    g = iter(_row(back, "F", enough))
    j = iter(_row(back, "I", enough))
    turns = [
        ((f,), 2 * (devices - rank) - 1),
        ((g, f), rank),
        ((g, j), devices - rank),
        ((f, i, g, j), enough - (2 * devices - 1 - rank)),
        ((i, g, j), devices - 1 - rank),
        ((i, j), rank),
        ((i,), devices - rank),
    ]
    actions = [next(stream) for streams, times in turns for _ in range(times) for stream in streams]
    return tuple(action for action in actions if action.chunk < chunks)


class _GapFilling:
    """A simulation of sequences of F and I, with W in the gaps.

    ``share`` of the seconds of a W is the least size of a gap.
    """

    def __init__(
        self, rows: Order, seconds: Mapping[Kind, Sequence[float]], copy: float, share: float
    ):
        self.rows = rows
        self.seconds = seconds
        self.copy = copy
        self.share = share
        self.device = stage_devices(rows)
        self.ends: dict[Action, float] = {}
        self.free = [0.0 for _ in rows]  # by device, the end of its last action
        self.next = [0 for _ in rows]  # by device, the position in its row
        self.weights: list[deque[Action]] = [deque() for _ in rows]  # each W whose I has run
        self.done: list[list[Action]] = [[] for _ in rows]
        self.held = [0 for _ in rows]  # activations

    def run(self) -> tuple[float, Order]:
        steps = [self._step(rank) for rank in range(len(self.rows))]
        for _ in range(3 * sum(map(len, self.rows)) // 2):
            start, rank, action = min(step for step in steps if step is not None)
            self._do(rank, action, start)
            stage = action.stage
            for neighbour in range(max(0, stage - 1), min(stage + 2, len(self.device))):
                steps[self.device[neighbour]] = self._step(self.device[neighbour])
        return max(self.free), tuple(map(tuple, self.done))

    def _step(self, rank: int) -> tuple[float, int, Action] | None:
        """Return the next action of a device: its start, the device, the action."""
        free = self.free[rank]
        position = self.next[rank]
        action = self.rows[rank][position] if position < len(self.rows[rank]) else None
        start = None if action is None else self._start(rank, action)
        if self.weights[rank]:
            weight = self.weights[rank][0]
            gap = self.share * self.seconds["W"][weight.stage]
            if start is None or (start > free and start >= free + gap):
                return free, rank, weight
        return None if action is None or start is None else (start, rank, action)

    def _start(self, rank: int, action: Action) -> float | None:
        """Return when an F or I can start, if that is known and the device may hold activations."""
        stage, kind, chunk = action
        free = self.free[rank]
        before = stage - 1 if kind == "F" else stage + 1
        if kind == "F" and self.held[rank] == len(self.device):
            return None
        if not 0 <= before < len(self.device):  # an I of the last stage is after its F in the row
            return free
        end = self.ends.get(Action(before, kind, chunk))
        if end is None:
            return None
        return max(free, end + (self.copy if self.device[before] != rank else 0.0))

    def _do(self, rank: int, action: Action, start: float) -> None:
        stage, kind, chunk = action
        self.done[rank].append(action)
        self.free[rank] = self.ends[action] = start + self.seconds[kind][stage]
        if kind == "W":
            self.weights[rank].popleft()
            self.held[rank] -= 1
            return
        self.next[rank] += 1
        if kind == "F":
            self.held[rank] += 1
        else:
            self.weights[rank].append(Action(stage, "W", chunk))
