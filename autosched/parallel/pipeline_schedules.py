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


def zero_bubble(devices: int, chunks: int) -> Order:
    """Return a schedule that fills bubbles with gradients by weights.

    ZB-V of Qi et al., "Zero bubble", arXiv 2401.10241, with W where torch's ScheduleZBVZeroBubble
    has them. Stages form a V, with stages s and 2p-1-s on device s. A device holds at most 2p
    activations of stages, from F to W. Bubble: (p-1) / (6m+p-1) where F, I and W are equally long
    and m >= 2p-1.

    >>> print(*zero_bubble(2, 1)[1])
    1F0 2F0 2I0 2W0 1I0 1W0
    """
    return tuple(_v_shaped(rank, devices, chunks) for rank in range(devices))


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
    """Return the actions of a device whose first stage is ``rank``, its second on the way back."""
    enough = max(chunks, 2 * devices - 1)  # to fill the pipeline; surplus is dropped at the end
    back = 2 * devices - 1 - rank
    f, i, w = (iter(_row(rank, kind, enough)) for kind in _KINDS)
    g, j, x = (iter(_row(back, kind, enough)) for kind in _KINDS)
    turns = [
        ((f,), 2 * (devices - rank) - 1),
        ((g, f), rank),
        ((g, j, x), devices - rank),
        ((f, i, w, g, j, x), enough - back),
        ((i, w, g, j, x), devices - 1 - rank),
        ((i, j), rank),
        ((i, w), devices - rank),
        ((x,), rank),
        ((w,), rank),
    ]
    actions = [next(stream) for streams, times in turns for _ in range(times) for stream in streams]
    return tuple(action for action in actions if action.chunk < chunks)
