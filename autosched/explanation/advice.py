"""Define a remedy as a change with its predicted makespan.

Every makespan is simulated. Gains are neither estimated nor combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

LEAST = 0.02  # of the makespan; changes that gain less are not listed
_MOST = 0.9  # of the gain of all changes, with which the first few suffice

_LAST = ("bound", "fewer bound", "keep inputs")

T = TypeVar("T")


class Remedy(NamedTuple):
    """A change, in words, with its tasks and values, and the predicted makespan with it.

    ``kind`` is ``pin``, ``keep`` or, for inputs that may differ from run to run, ``keep inputs``;
    ``launch``, ``host read`` or ``copy streams``; ``host bound`` for tasks that are bound to a CPU
    and slow there; ``policy`` for a better placement, or ``bound`` for one that the user's bindings
    forbid; and each of these two as ``idle ...`` or ``fewer ...`` if it uses more devices, or
    fewer.
    """

    kind: str
    words: str
    tasks: tuple[str, ...]
    values: tuple[str, ...]
    makespan: float


@dataclass(frozen=True)
class Advice:
    """A worthwhile remedy; ``gain`` is the seconds it saves, ``share`` its part of the makespan."""

    kind: str
    words: str
    tasks: tuple[str, ...]
    values: tuple[str, ...]
    makespan: float
    gain: float
    share: float


def worthwhile(remedies: Iterator[Remedy], makespan: float) -> tuple[Advice, ...]:
    """Return worthwhile remedies, the largest gain first.

    Remedies that change a distribution over devices chosen by the user come last, and so do those
    that depend on a condition.

    >>> remedy = Remedy("pin", "pin 'x'", (), ("x",), 3.0)
    >>> [(advice.kind, advice.gain, advice.share) for advice in worthwhile(iter([remedy]), 4.0)]
    [('pin', 1.0, 0.25)]
    """
    gains = [(makespan - remedy.makespan, remedy) for remedy in remedies]
    paying = [(gain, remedy) for gain, remedy in gains if gain > LEAST * makespan]
    paying.sort(key=lambda pair: (pair[1].kind in _LAST, -pair[0]))
    return tuple(Advice(*remedy, gain, gain / makespan) for gain, remedy in paying)


def fewest(
    items: Sequence[T], makespan: float, without: Callable[[Sequence[T]], float], tries: int = 16
) -> tuple[Sequence[T], float]:
    """Return the first few items that gain nearly as much as all of them.

    ``without`` returns the makespan without the effect of some items. After ``tries`` calls the
    search stops and returns all items.

    >>> fewest([5, 1, 4], 12.0, lambda removed: 12.0 - sum(removed))
    ([5, 1, 4], 2.0)
    >>> fewest([9, 1, 0], 12.0, lambda removed: 12.0 - sum(removed))
    ([9], 3.0)
    """
    least = without(items)
    count = 1
    while count < len(items) and count < 1 << tries:
        few = without(items[:count])
        if makespan - few >= _MOST * (makespan - least):
            return items[:count], few
        count *= 2
    return items, least
