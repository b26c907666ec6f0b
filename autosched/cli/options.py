"""Parse command-line options for machine, policy and costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autosched.cli.faults import say
from autosched.cli.subject import Subject
from autosched.costs.costs import Costs
from autosched.errors import AutoschedError, UsageError
from autosched.machine.machine import LINKS, Machine
from autosched.policies import POLICIES, TIMED
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule

__all__ = [
    "NAMES",
    "add_costs",
    "add_planning",
    "add_search",
    "costs_of",
    "count",
    "examples_of",
    "factor",
    "gpus",
    "planned",
    "read",
]

T = TypeVar("T")

_MOST_GPUS = 256

_LINKS = f"what joins them: {', '.join(LINKS)} (default: pcie4)"
NAMES = ("auto", *TIMED, *POLICIES)
"""Of policies."""


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``planned``: machine, policy and costs."""
    group = parser.add_argument_group(
        "machine and policy",
        "By default what a saved schedule has, or what the function returns, or 2 emulated GPUs.",
    )
    group.add_argument(
        "--gpus", type=gpus, metavar="N", help="an emulated machine of one CPU and N GPUs"
    )
    group.add_argument("--link", choices=tuple(LINKS), metavar="LINK", help=_LINKS)
    group.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="a machine as JSON, as `autosched devices` writes",
    )
    group.add_argument(
        "--local", action="store_true", help="this machine; with --gpus, so many of its GPUs"
    )
    group.add_argument(
        "--slower",
        type=factor,
        metavar="F",
        help="that machine, F times slower, to be played by a CPU",
    )
    group.add_argument(
        "--policy", choices=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (default: auto)"
    )
    add_search(group)
    add_costs(group)


def add_search(group: Any) -> None:
    """Add the options of policies that search."""
    timed = f"auto, {', '.join(TIMED)}"
    group.add_argument(
        "--seconds", type=factor, metavar="S", help=f"look so long for better plans: {timed}"
    )
    group.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of what is random (default: 0)"
    )


def add_costs(group: Any) -> None:
    """Add the option that ``costs_of`` reads."""
    group.add_argument(
        "--costs", type=Path, metavar="FILE", help="costs as JSON, as `autosched measure` writes"
    )


def planned(arguments: argparse.Namespace, found: Subject) -> Schedule:
    """Return the schedule of a subject: the saved one, unless an option requests another."""
    options = "link", "machine", "local", "slower", "policy", "seconds", "costs"
    asked = any(getattr(arguments, name) for name in options)
    if found.schedule is not None and not asked and arguments.gpus is None:
        return found.schedule
    costs = costs_of(arguments, found)
    machine = _machine(arguments, found)
    return schedule(
        found.graph,
        machine,
        policy=arguments.policy or "auto",
        seconds=arguments.seconds,
        seed=arguments.seed,
        progress=sys.stderr.isatty(),
        costs=costs,
        examples=examples_of(found, costs),
    )


def examples_of(found: Subject, costs: Costs | None) -> Mapping[str, Any] | None:
    """Return the inputs to estimate costs from, if costs are not given.

    Print a note if there are none.
    """
    if costs is not None:
        return None
    if found.inputs is None and not found.graph.input_names:
        return {}
    if found.inputs is None and all(task.seconds is None for task in found.graph.tasks):
        say(
            "note: nothing tells what tasks cost, so each is taken to cost 10 us; return inputs too, or give --costs"
        )
    return found.inputs


def costs_of(arguments: argparse.Namespace, found: Subject) -> Costs | None:
    """Return the costs of a file or of a saved schedule, or None."""
    if arguments.costs is not None:
        return read(arguments.costs, Costs.from_json)
    return None if found.schedule is None else found.schedule.costs


def _machine(arguments: argparse.Namespace, found: Subject) -> Machine:
    asked = {"--gpus or --link": arguments.gpus is not None or arguments.link is not None}
    if arguments.local and arguments.link is None:
        asked = {}  # --gpus has their number
    asked |= {"--machine": arguments.machine is not None, "--local": arguments.local}
    if len(names := [name for name, given in asked.items() if given]) > 1:
        raise UsageError(f"{' and '.join(names)} name different machines; give one of them")
    if arguments.local:
        machine = Machine.local(gpus=arguments.gpus)
    elif arguments.machine is not None:
        machine = read(arguments.machine, Machine.from_json)
    elif asked["--gpus or --link"] or found.machine is None:
        machine = Machine.emulated(2 if arguments.gpus is None else arguments.gpus, arguments.link)
    else:
        machine = found.machine
    return machine.slower(arguments.slower) if arguments.slower else machine


def read(path: Path, parse: Callable[[str], T]) -> T:
    """Return the content of a file. Raises UsageError that names the file, and OSError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (AutoschedError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def count(text: str) -> int:
    """Parse an integer above 0."""
    return _whole(text, 1)


def gpus(text: str) -> int:
    """Parse a number of GPUs, which are all linked to each other: a few hundred at most."""
    return _whole(text, 0, _MOST_GPUS)


def seed(text: str) -> int:
    """Parse a seed that torch accepts."""
    return _whole(text, 0, 2**64 - 1)


def _whole(text: str, least: int, most: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {number}")
    return number


def factor(text: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number
