"""``autosched simulate`` predicts a schedule, and ``autosched verify`` checks it for races."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from autosched._lib.text import amount, count, table
from autosched.cli.faults import CHECK_FAILED, say
from autosched.cli.options import add_planning, planned
from autosched.cli.output import json_text
from autosched.cli.subject import add_thing, subject
from autosched.errors import ProgramError, ScheduleError
from autosched.scheduling.schedule import Schedule
from autosched.timeline.timeline import Timeline
from autosched.viz.paint import duration

__all__ = ["add", "devices", "summary"]


def add(commands: Any) -> None:
    """Add both commands."""
    simulate = commands.add_parser(
        "simulate",
        help="predict how long a schedule takes, and how busy each device is",
        description="Predict how long a schedule takes, how near that is to the best, and how busy devices are.",
        epilog="example: autosched simulate autosched.demo:mlp_example --link nvlink4 --policy heft --json",
    )
    verify = commands.add_parser(
        "verify",
        help="prove that a schedule cannot race; exit with 1 if it can",
        description="Prove by vector clocks that whatever must be ordered is, or name the line that races.",
        epilog="example: autosched verify plan.json",
    )
    for parser, do in ((simulate, _simulate), (verify, _verify)):
        add_thing(parser)
        add_planning(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(do=do)


# ---- simulate


def _simulate(arguments: argparse.Namespace) -> int:
    made = planned(arguments, subject(arguments.thing, arguments.graph))
    print(json_text(_facts(made)) if arguments.json else summary(made))
    return 0


def _facts(made: Schedule) -> dict[str, Any]:
    overlap = made.simulate().overlap()
    return {
        "graph": made.graph.name,
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "gap": made.gap,
        "serial_seconds": made.serial_seconds,
        "copy_seconds": overlap.copy_seconds,
        "copies_hidden": overlap.copies_hidden if overlap.copy_seconds else None,
        "devices": devices(made, made.simulate()),
    }


def devices(made: Schedule, timeline: Timeline) -> dict[str, dict[str, Any]]:
    """Return by device its number of tasks, busy and idle time, and peak memory."""
    tasks = Counter(made.placement.device.values())
    return {
        name: {
            "tasks": tasks[name],
            "busy_seconds": (busy := timeline.computing(name)),
            "idle_seconds": timeline.makespan - busy,
            "peak_bytes": made.peak_bytes[name],
        }
        for name in made.machine.names
    }


def summary(made: Schedule) -> str:
    """Return the prediction in a few lines."""
    overlap = made.simulate().overlap()
    hidden = f"{overlap.copies_hidden:.0%}" if overlap.copy_seconds else "-"
    notes = [
        ("makespan", duration(made.makespan), "predicted"),
        (
            "lower bound",
            duration(made.lower_bound),
            f"no schedule can be faster; the gap is {made.gap:.0%}",
        ),
        ("serial", duration(made.serial_seconds), "the same tasks and copies, one at a time"),
        (
            "copies hidden",
            hidden,
            "of their time, behind compute" if overlap.copy_seconds else "there are none",
        ),
    ]
    lines = [
        f"{made.graph.name}: {count(len(made.graph), 'task')}, {count(len(made.program), 'instruction')}"
    ]
    lines += [f"  {label:<14}{value:>10}  {note}" for label, value, note in notes]
    rows = [
        (
            name,
            str(found["tasks"]),
            duration(found["busy_seconds"]),
            duration(found["idle_seconds"]),
            amount(found["peak_bytes"], "B"),
        )
        for name, found in devices(made, made.simulate()).items()
    ]
    return "\n".join([*lines, "", *table(("device", "tasks", "busy", "idle", "peak memory"), rows)])


# ---- verify


def _verify(arguments: argparse.Namespace) -> int:
    try:
        made = planned(arguments, subject(arguments.thing, arguments.graph))
        made.verify()
    except (ProgramError, ScheduleError) as error:
        fault = error if isinstance(error, ProgramError) else error.__cause__
        if not isinstance(fault, ProgramError):
            raise
        if arguments.json:
            print(json_text({"proved": False, "fault": str(fault)}))
        say(f"{arguments.thing} is not proved: {fault}")
        return CHECK_FAILED
    if arguments.json:
        print(
            json_text(
                {
                    "proved": True,
                    "instructions": len(made.program),
                    "streams": len(made.program.streams),
                }
            )
        )
    else:
        streams = count(len(made.program.streams), "stream")
        print(f"proved: {count(len(made.program), 'instruction')} on {streams} cannot race")
    return 0
