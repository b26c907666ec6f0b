"""Define how a graph is called, and what is known of its inputs and outputs between calls.

A captured step derives from ``Binding``. Any other graph is called with its inputs, and nothing more
is known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autosched.graph.graph import Graph
from autosched.graph.task import Followed
from autosched.machine.machine import Machine

Finish = Callable[[Mapping[str, Any]], Any]


class Binding:
    """How a graph is called. These attributes are of captured steps alone."""

    followed: Followed | None = None  # what autograd would have followed, if known
    state_inputs: frozenset[str] = frozenset()  # inputs that are the same tensors in each run
    on_all_ranks: bool = False  # each rank has all inputs, with equal contents
    homes: Mapping[str, str] = {}  # by output, the torch device on which eager execution has it
    made: Collection[str] = ()  # outputs that are new state

    def completed(
        self, graph: Graph, args: Sequence[Any], inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Finish | None]:
        """Return the inputs of a run by name, and a function to call with its outputs, or None.

        Raises GraphError for too many, and for an input that is given twice.
        """
        return graph.named(args, inputs), None

    def state_on(self, graph: Graph, machine: Machine) -> frozenset[str]:
        """Return the inputs that are state, which may stay on devices between runs.

        Over ranks, it is the inputs that each of them has. No rank can write those of another.
        """
        if machine.ranks:
            return frozenset(graph.input_names if self.on_all_ranks else ())
        return self.state_inputs


def binding_of(graph: Graph) -> Binding:
    """Return how a graph is called.

    >>> binding_of(Graph()).state_inputs
    frozenset()
    """
    return graph if isinstance(graph, Binding) else Binding()
