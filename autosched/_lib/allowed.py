"""Define which names, device names and numbers are valid.

Each rule is here once; callers raise their own errors.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, TypeGuard

# Keywords of runs of a schedule, so no input has these names.
WORDS = ("repeat", "timeout", "warmup")

_MISFIT = re.compile(r"[\s@]")


def is_name(item: Any) -> TypeGuard[str]:
    """Whether this is one word in the text of a program, which a version can follow.

    >>> [is_name(item) for item in ("h", "h.1", "größe/2", "h@1", "two words", "", None)]
    [True, True, True, False, False, False, False]
    """
    return isinstance(item, str) and item != "" and _MISFIT.search(item) is None


def is_device(item: Any) -> TypeGuard[str]:
    """Whether this can name a device: a name that a stream can follow.

    >>> [is_device(item) for item in ("cpu", "cuda:0", "cuda:0/compute", "")]
    [True, True, False, False]
    """
    return is_name(item) and "/" not in item


def is_cpu(device: str) -> bool:
    """Whether a device of this name is a CPU: ``"cpu"``, ``"cpu:1"``."""
    return device.partition(":")[0] == "cpu"


def is_storage(device: str) -> bool:
    """Whether a device of this name is a storage device: ``"disk:0"``, ``"disk:1"``.

    >>> is_storage("disk:0"), is_storage("cuda:0")
    (True, False)
    """
    return device.partition(":")[0] == "disk"


def device_name(item: Any) -> Any:
    """Return the name of a device given as in torch: a string, ``torch.device`` or GPU index.

    An index is that of an accelerator of the type that torch has here, by default of a CUDA device.
    Anything else is returned unchanged, for the caller to reject.

    >>> device_name("cuda:0"), device_name(1), device_name(-1), device_name(None)
    ('cuda:0', 'cuda:1', -1, None)
    """
    if isinstance(item, str) or item is None:
        return item
    if is_whole(item) and item >= 0:
        torch: Any = sys.modules.get("torch")
        is_there = torch is not None and torch.accelerator.is_available()
        return f"{torch.accelerator.current_accelerator().type if is_there else 'cuda'}:{item}"
    kind = type(item)
    return str(item) if (kind.__module__, kind.__name__) == ("torch", "device") else item


def by_device(item: Any) -> Any:
    """Return a table by device with the names of the devices as keys; other items unchanged.

    >>> by_device({0: 1.0, "cpu": 2.0}), by_device(3.0)
    ({'cuda:0': 1.0, 'cpu': 2.0}, 3.0)
    """
    if not isinstance(item, Mapping) or all(type(name) is str for name in item):
        return item
    return {device_name(name): number for name, number in item.items()}


def is_number(item: Any, infinite: bool = False) -> bool:
    """Whether this is a number, 0 or more, that a float can hold, and not a bool.

    >>> [is_number(item) for item in (0, 2.5, 10**400, True, "1", math.nan, math.inf)]
    [True, True, False, False, False, False, False]
    """
    if type(item) is not float:  # most are floats; isinstance of Real takes ten times as long
        if isinstance(item, bool) or not isinstance(item, Real):
            return False
        try:
            item = float(item)
        except OverflowError:
            return False
    return 0 <= item < math.inf or (infinite and item == math.inf)


def is_whole(item: Any) -> bool:
    """Whether this is an integer, and not a bool.

    >>> [is_whole(item) for item in (-1, 10**400, 1.0, True)]
    [True, True, False, False]
    """
    return isinstance(item, int) and not isinstance(item, bool)


def no_seconds(item: Any) -> Iterator[Any]:
    """Yield the invalid numbers in the seconds of a task: one number, or one per device.

    Infinity is valid: the task cannot run there.

    >>> list(no_seconds({"cpu": 1.0, "cuda:0": math.inf, "cuda:1": -1})), list(no_seconds("1"))
    ([-1], ['1'])
    """
    numbers = item.values() if isinstance(item, Mapping) else [item]
    return (number for number in numbers if not is_number(number, infinite=True))
