"""``autosched explain`` explains the makespan of a schedule and suggests improvements."""

from __future__ import annotations

import argparse
from typing import Any

from autosched._lib.json_reader import plain
from autosched.cli.options import add_planning, count, planned
from autosched.cli.output import json_text
from autosched.cli.run import inputs_of, profiled
from autosched.cli.subject import add_thing, subject

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="say why a schedule takes as long as it does, and what would help",
        description="Explain a schedule, as predicted or as measured; or one task: why there, and what it waited for.",
        epilog="example: autosched explain autosched.demo:mlp_example --task sgd_w1",
    )
    add_thing(parser)
    parser.add_argument("--task", metavar="NAME", help="explain this task")
    parser.add_argument(
        "--profile", action="store_true", help="run it, and explain what was measured"
    )
    parser.add_argument(
        "--repeat",
        type=count,
        default=9,
        metavar="N",
        help="take the median of N runs (default: 9)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_planning(parser)
    parser.set_defaults(do=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    found = subject(arguments.thing, arguments.graph)
    with planned(arguments, found) as made:
        measured = None
        if arguments.profile:
            measured = profiled(made, inputs_of(found, arguments.thing), arguments.repeat)
        explanation = made.explain(arguments.task, measured)
    print(json_text(plain(explanation)) if arguments.json else explanation)
    return 0
