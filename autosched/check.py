"""Watch a task while it runs: it may write only what it declared, and return only what is its own.

Compares version counters and memory addresses of tensors before and after. Counters do not see writes through
``.data`` or NumPy, nor those of some fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autosched.errors import HazardError
from autosched.graph import Graph, Task
from autosched.tree import addresses, flatten

__all__ = ["watched"]


def watched(
    call: Callable[[], Any],
    graph: Graph,
    task: Task,
    arguments: Callable[[], Sequence[Any]],
    results: Callable[[], Sequence[Any]],
) -> Callable[[], None]:
    """Return ``call`` with a check around it. The result raises HazardError naming task, argument and line.

    ``arguments`` and ``results`` return what the task's ``reads`` and its used ``outputs`` hold, in order.
    """
    names = [graph.values[use.value].name for use in task.reads]
    written = {graph.values[use.value].root for use in task.writes}
    declared = [graph.values[use.value].root in written for use in task.reads]
    roots = [graph.values[use.value].root for use in task.reads]
    made = [graph.values[use.value] for use in task.outputs if graph.is_used(use.value)]

    def step() -> None:
        before = [_versions(item) for item in arguments()]
        call()
        for name, version, item, may in zip(names, before, arguments(), declared, strict=True):
            if not may and _versions(item) != version:
                raise HazardError(
                    f"task {task.name!r} wrote its argument {name!r} in place without declaring it: "
                    f"graph.add(..., writes=[{name}])\n    added at {task.source}"
                )
        given = zip(names, roots, arguments(), strict=True)
        seen = {address: (name, root) for name, root, item in given for address in addresses(item)}
        for value, item in zip(made, results(), strict=True):
            for address in addresses(item):
                name, root = seen.setdefault(address, (value.name, value.root))
                if root != value.root:
                    raise HazardError(
                        f"result {value.name!r} of task {task.name!r} shares memory with {name!r} without declaring "
                        f"it: graph.add(..., aliases={name}), or return a copy\n    added at {task.source}"
                    )

    return step


def _versions(item: Any) -> list[int]:
    return [leaf._version for leaf in flatten(item) if hasattr(leaf, "_version") and not leaf.is_inference()]
