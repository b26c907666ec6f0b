"""Load what a command works on.

That is a saved schedule, or what a function of the user returns.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosched.cli.faults import TheirError
from autosched.errors import UsageError, listed, shown
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.scheduling.schedule import Schedule, load

__all__ = ["Subject", "add_thing", "subject"]


@dataclass(frozen=True)
class Subject:
    """A graph, with optional inputs, machine and schedule."""

    graph: Graph
    inputs: Mapping[str, Any] | None = None
    machine: Machine | None = None
    schedule: Schedule | None = None


def add_thing(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a subject, and the option for the graph of a saved schedule."""
    parser.add_argument(
        "thing",
        metavar="THING",
        help="a saved schedule (plan.json), or module:function or file.py:function",
    )
    parser.add_argument(
        "--graph",
        metavar="FUNCTION",
        help="module:function that builds the graph of a saved schedule",
    )


def subject(thing: str, graph: str | None = None) -> Subject:
    """Load the subject that a text names. Raises UsageError if it is missing or invalid."""
    if Path(thing).is_file() and not thing.endswith(".py"):
        built = _built(graph) if graph is not None else None
        made = load(thing, built.graph if built is not None else None)
        return Subject(made.graph, built.inputs if built is not None else None, made.machine, made)
    if graph is not None:
        raise UsageError(f"--graph goes with a saved schedule, and {thing!r} is no file")
    return _built(thing)


def _built(text: str) -> Subject:
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        hint = (
            f"name a function in it, {text}:function"
            if text.endswith(".py")
            else "no such file, and no function"
        )
        raise UsageError(
            f"{text}: {hint}; a THING is plan.json, package.module:function or file.py:function"
        )
    found = _found(_module(where), where, name)
    if not callable(found) or isinstance(found, Schedule):
        return _as_subject(text, found)
    if _wants_arguments(found):
        raise UsageError(
            f"{text} is called without arguments, and it is {name}{inspect.signature(found)}"
        )
    try:
        returned = found()
    except Exception as error:
        raise TheirError(f"{text} failed") from error
    return _as_subject(text, returned)


def _module(where: str) -> Any:
    """Import a module by its path, or a file, whose folder is importable as for a script."""
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return _run_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{where}.".startswith(f"{error.name}."):
            raise UsageError(
                f"there is no module {error.name!r}, neither installed nor in this folder"
            ) from None
        raise TheirError(f"{where} cannot be imported") from error
    except UsageError:
        raise
    except Exception as error:
        raise TheirError(f"{where} cannot be imported") from error


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def _found(module: Any, where: str, name: str) -> Any:
    if not hasattr(module, name):
        mine = [
            key
            for key, item in vars(module).items()
            if inspect.isfunction(item)
            and item.__module__ == module.__name__
            and not key.startswith("_")
        ]
        raise UsageError(f"{where} has no {name!r}; its functions are {listed(mine)}")
    return getattr(module, name)


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it is written in C and has no signature
        return False
    return False


def _as_subject(text: str, item: Any) -> Subject:
    match item:
        case Schedule():
            return Subject(item.graph, None, item.machine, item)
        case Graph():
            return Subject(item)
        case (Graph() as graph, Mapping() as inputs):
            return Subject(graph, inputs)
        case (Graph() as graph, Mapping() as inputs, Machine() as machine):
            return Subject(graph, inputs, machine)
    raise UsageError(
        f"{text} must return a Graph, (Graph, inputs), (Graph, inputs, Machine) or a Schedule, "
        f"got {shown(type(item).__name__)}"
    )
