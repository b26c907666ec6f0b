"""Write the calls of a task as statements that assign its results to variables.

A merged task is written as the calls of its parts. A region, whose function is not its composite,
is written as one call, of a function of the module that contains these calls.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from autosched._lib.tree import flatten
from autosched.codegen.calls import Caller, literal
from autosched.codegen.names import Names
from autosched.codegen.pieces import Piece, bracketed, laid_out
from autosched.graph.composite import Composite
from autosched.graph.graph import Task, Value

__all__ = ["Statements", "deletion", "is_region", "region_text"]


def is_region(task: Task) -> bool:
    """Whether a task has parts, and a function that does what they do."""
    return task.composite is not None and task.fn is not task.composite


def region_text(task: Task, name: str, caller: Caller, names: Names) -> str:
    """Return the definition of a function that does what a region does.

    Its last parameters are the devices of ``Here``.
    """
    whole = task.composite
    assert whole is not None
    taken = [leaf.name for leaf in task.args[: len(whole.takes)]]
    given = {index: names.variable(label) for index, label in zip(whole.takes, taken, strict=True)}
    devices = [names.variable("device") for _ in whole.heres]
    head = bracketed(f"def {name}", "()", [Piece(text) for text in (*given.values(), *devices)])
    pieces = Statements(caller, names).parts(whole, given, devices[0] if devices else "_")
    lines = [" " * 4 + laid_out(piece, 4) for piece in pieces if piece.before != "del "]
    returned = Piece("", tuple(Piece(given[index]) for index in whole.gives))
    lines.append("    " + laid_out(returned.prefixed("return "), 4))
    return "\n".join(["@torch.compile", laid_out(head, 0, 1) + ":", *lines]) + "\n"


def deletion(names: list[str]) -> Piece:
    """Return a statement that deletes variables."""
    return Piece("del ", tuple(map(Piece, names)))


class Statements:
    """Writes statements; ``names`` gives variables to the results."""

    def __init__(self, caller: Caller, names: Names):
        self.caller = caller
        self.names = names

    def of(
        self,
        task: Task,
        given: Mapping[int, str],
        made: dict[int, str],
        used: Container[int],
        device: str,
    ) -> Iterator[Piece]:
        """Write the calls of a task, and add the names of used results to ``made``."""
        whole = task.composite
        if whole is not None and not is_region(task):
            yield from self._merged(task, whole, given, made, used, device)
            return
        call = self.caller.call(task, given.__getitem__, device)
        values = list(flatten(task.result))
        if not values or (call.kind == "call" and not any(value.index in used for value in values)):
            yield call.piece
            return
        names = {value.index: self.names.variable(value.name) for value in values}
        made.update(names)
        yield from self._unpacked(task.result, call.piece, names)
        if unused := [name for index, name in names.items() if index not in used]:
            yield deletion(unused)

    def _merged(
        self,
        task: Task,
        whole: Composite,
        given: Mapping[int, str],
        made: dict[int, str],
        used: Container[int],
        device: str,
    ) -> Iterator[Piece]:
        """Write the calls of a merged task; delete intermediate results after their last use."""
        names = {
            inner: given[value.index] for inner, value in zip(whole.takes, task.args, strict=False)
        }
        yield from self.parts(whole, names, device)
        results = zip(whole.gives, task.outputs, strict=True)
        made.update((use.value, names[inner]) for inner, use in results)
        if unused := [made[use.value] for use in task.outputs if use.value not in used]:
            yield deletion(unused)

    def parts(self, whole: Composite, names: dict[int, str], device: str) -> Iterator[Piece]:
        """Write the calls of the parts of a merged task; add the names of their results."""
        for part, dead in zip(whole.tasks, whole.dead, strict=True):
            own = {use.value for use in part.outputs}
            yield from self.of(part, names, names, own.difference(dead), device)
            if last := [names[index] for index in dead if index not in own]:
                yield deletion(last)

    def _unpacked(self, shape: Any, piece: Piece, made: Mapping[int, str]) -> Iterator[Piece]:
        """Assign the result of a call to names, in its structure."""
        dicts: list[tuple[str, dict[Any, Any]]] = []
        target = self._target(shape, made, dicts)
        if target.endswith(")") and len(shape) > 1:
            target = target[1:-1]
        yield piece.prefixed(f"{target} = ")
        for name, items in dicts:
            for key, item in items.items():
                yield from self._unpacked(item, Piece(f"{name}[{literal(key) or repr(key)}]"), made)
            yield deletion([name])

    def _target(
        self, shape: Any, made: Mapping[int, str], dicts: list[tuple[str, dict[Any, Any]]]
    ) -> str:
        """Return the target of an assignment.

        Dicts, which cannot be targets, get a name and are added to ``dicts``.
        """
        if isinstance(shape, Value):
            return made[shape.index]
        if isinstance(shape, dict):
            dicts.append((self.names.variable("results"), shape))
            return dicts[-1][0]
        inner = ", ".join(self._target(item, made, dicts) for item in shape)
        return f"({inner},)" if len(shape) == 1 else f"({inner})"
