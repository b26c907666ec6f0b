"""``autosched measure`` measures costs of tasks and rates of links.

The result is JSON that other commands accept.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autosched.cli.faults import TheirError
from autosched.cli.options import count, gpus
from autosched.cli.output import deliver, tracker
from autosched.cli.run import inputs_of
from autosched.cli.subject import add_thing, subject
from autosched.errors import AutoschedError
from autosched.machine.machine import Machine

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "measure",
        help="measure what tasks cost here, for --costs, and how fast links are, for --machine",
        description="Measure each task on each kind of device that is here, and copies between devices: medians.",
        epilog="example: autosched measure autosched.demo:mlp_example -o costs.json --links machine.json",
    )
    add_thing(parser)
    parser.add_argument(
        "--gpus", type=gpus, metavar="N", help="use N of the GPUs; more than there are share them"
    )
    parser.add_argument(
        "--repeat",
        type=count,
        default=5,
        metavar="N",
        help="take the median of N runs (default: 5)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the costs there instead of to stdout",
    )
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="measure links too, and write the machine there"
    )
    parser.add_argument(
        "--replay", action="store_true", help="what kernels take alone, as CUDA graphs replay them"
    )
    parser.add_argument(
        "--cache",
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="keep readings there (default: in ~/.cache/autosched)",
    )
    parser.set_defaults(do=_measure)


def _measure(arguments: argparse.Namespace) -> int:
    from autosched.measurement import measure_costs, measure_machine

    found = subject(arguments.thing, arguments.graph)
    inputs = inputs_of(found, arguments.thing)
    machine = Machine.local(gpus=arguments.gpus)
    try:
        costs = measure_costs(
            found.graph,
            machine,
            inputs,
            repeat=arguments.repeat,
            replay=arguments.replay,
            cache=arguments.cache,
            track=tracker("measuring"),
        )
    except AutoschedError:
        raise
    except Exception as error:
        raise TheirError("a task failed while it was measured") from error
    deliver(costs.to_json() + "\n", arguments.output)
    if arguments.links is not None:
        measured = measure_machine(machine, cache=arguments.cache, track=tracker("copying"))
        deliver(measured.to_json() + "\n", arguments.links)
    return 0
