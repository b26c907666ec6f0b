"""Load the graph, schedule, machine and costs of a command.

The graph is that of a saved schedule, or what a function of the user returns.
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
from typing import Any, TypeVar

from autosched.cli.output import UserCodeError, say
from autosched.costs.costs import Costs
from autosched.errors import AutoschedError, UsageError, listed, shown
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule, load

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A graph, with optional inputs, machine and schedule; ``name`` is what the user typed."""

    name: str
    graph: Graph
    inputs: Mapping[str, Any] | None = None
    machine: Machine | None = None
    schedule: Schedule | None = None


def subject_of(arguments: argparse.Namespace) -> Subject:
    """Load the subject of a command. Raises UsageError if it is missing or invalid."""
    name = arguments.thing
    builder = arguments.graph
    if Path(name).is_file() and not name.endswith(".py"):
        if builder is None:
            how = "give the function that builds its graph, --graph module:function"
            raise UsageError(f"{name}: a saved schedule holds no functions; {how}")
        built = _built(builder)
        made = load(name, built.graph)
        return Subject(name, made.graph, built.inputs, made.machine, made)
    if builder is not None:
        raise UsageError(f"--graph goes with a saved schedule, and {name!r} is no file")
    return _built(name)


def planned(arguments: argparse.Namespace, subject: Subject) -> Schedule:
    """Return the schedule of a subject: the saved one, unless an option requests another."""
    plan = "policy", "seconds", "costs", "in_flight", "objective"
    options = "link", "hosts", "network", "machine", "local", "slower", *plan
    asked = any(getattr(arguments, name) for name in options) or arguments.gpus is not None
    if subject.schedule is not None and not asked:
        return subject.schedule
    costs = costs_of(arguments, subject)
    return schedule(
        subject.graph,
        _machine(arguments, subject),
        policy=arguments.policy or "auto",
        seconds=arguments.seconds,
        seed=arguments.seed,
        progress=sys.stderr.isatty(),
        costs=costs,
        examples=examples_of(subject, costs),
        in_flight=arguments.in_flight,
        objective=arguments.objective or "makespan",
    )


def _machine(arguments: argparse.Namespace, subject: Subject) -> Machine:
    """Return the machine that options describe, or that of the subject, or 2 emulated GPUs."""
    cluster = arguments.hosts is not None or arguments.network is not None
    emulated = arguments.gpus is not None or arguments.link is not None or cluster
    asked = {"--hosts or --network" if cluster else "--gpus or --link": emulated}
    if arguments.local and arguments.link is None and not cluster:
        asked = {}  # --gpus is the number of local GPUs
    asked |= {"--machine": arguments.machine is not None, "--local": arguments.local}
    if len(names := [name for name, given in asked.items() if given]) > 1:
        raise UsageError(f"{' and '.join(names)} name different machines; give one of them")
    if arguments.local:
        machine = Machine.local(gpus=arguments.gpus)
    elif arguments.machine is not None:
        machine = read(arguments.machine, Machine.from_json)
    elif emulated or subject.machine is None:
        gpus = 2 if arguments.gpus is None else arguments.gpus
        machine = emulated_machine(gpus, arguments.link, arguments.hosts, arguments.network)
    else:
        machine = subject.machine
    return machine.slower(arguments.slower) if arguments.slower else machine


def emulated_machine(
    gpus: int, link: str | None, hosts: int | None, network: str | None
) -> Machine:
    """Return an emulated machine; a network alone asks for 2 hosts."""
    if network is None:
        return Machine.emulated(gpus, link, hosts=hosts)
    return Machine.emulated(gpus, link, hosts=hosts or 2, network=network)


def costs_of(arguments: argparse.Namespace, subject: Subject) -> Costs | None:
    """Return the costs of a file or of a saved schedule, or None."""
    if arguments.costs is not None:
        return read(arguments.costs, Costs.from_json)
    return None if subject.schedule is None else subject.schedule.costs


def examples_of(subject: Subject, costs: Costs | None) -> Mapping[str, Any] | None:
    """Return the inputs to estimate costs from, if costs are not given; note if there are none."""
    if costs is not None:
        return None
    if subject.inputs is None and not subject.graph.input_names:
        return {}
    if subject.inputs is None and all(task.seconds is None for task in subject.graph.tasks):
        say(
            "note: nothing tells what tasks cost, so each is taken to cost 10 us; "
            "return inputs too, or give --costs"
        )
    return subject.inputs


def inputs_of(subject: Subject) -> Mapping[str, Any]:
    """Return the inputs that came with a graph. Raises UsageError if required ones are missing."""
    name = subject.name
    if subject.inputs is None and subject.graph.input_names:
        how = "let its function return (graph, {name: tensor})"
        raise UsageError(f"{name} gives no inputs; {how}")
    return subject.inputs or {}


def read(path: Path, parse: Callable[[str], T]) -> T:
    """Return the content of a file. Raises UsageError that names the file, and OSError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (AutoschedError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


# ---- functions of the user


def returned(text: str) -> Any:
    """Return what a function returns that is named as ``module:function``."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        hint = "no such file, and no function"
        if text.endswith(".py"):
            hint = f"name a function in it, {text}:function"
        forms = "package.module:function, file.py:function or plan.json"
        raise UsageError(f"{text}: {hint}; a THING is {forms}")
    item = _attribute(_module(where), where, name)
    if callable(item) and not isinstance(item, Schedule):
        if _wants_arguments(item):
            signature = f"{name}{inspect.signature(item)}"
            raise UsageError(f"{text} is called without arguments, and it is {signature}")
        try:
            item = item()
        except Exception as error:
            raise UserCodeError(f"{text} failed") from error
    return item


def _built(text: str) -> Subject:
    """Return the subject that a function returns, named as ``module:function``."""
    item = returned(text)
    match item:
        case Schedule():
            return Subject(text, item.graph, None, item.machine, item)
        case Graph():
            return Subject(text, item)
        case (Graph() as graph, Mapping() as inputs):
            return Subject(text, graph, inputs)
        case (Graph() as graph, Mapping() as inputs, Machine() as machine):
            return Subject(text, graph, inputs, machine)
    raise UsageError(
        f"{text} must return a Graph, (Graph, inputs), (Graph, inputs, Machine) or a Schedule, "
        f"got {shown(type(item).__name__)}"
    )


def _module(where: str) -> Any:
    """Import a module, or a file as a script."""
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return _run_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{where}.".startswith(f"{missing}."):
            places = "neither installed nor in this folder"
            raise UsageError(f"there is no module {missing!r}, {places}") from None
        raise UserCodeError(f"{where} cannot be imported") from error


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


def _attribute(module: Any, where: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        key
        for key, item in vars(module).items()
        if inspect.isfunction(item)
        and item.__module__ == module.__name__
        and not key.startswith("_")
    ]
    raise UsageError(f"{where} has no {name!r}; its functions are {listed(own)}")


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it is written in C and has no signature
        return False
    return False
