"""The command line, ``autosched COMMAND``.

parser    the commands and their options
loading   what a command works on: a saved schedule or a graph, its machine and its costs
commands  demo, devices, simulate, verify, explain, compare and measure
plan      the command ``plan``: does a training step fit?
show      the command ``show``: text and pictures
run       the command ``run``: runs, profiles, comparison with the serial run
output    results, progress and errors

A command is a function from the parsed arguments to an exit code. Commands print, and write the
files that they are asked to write. torch is imported only by commands that need it, so help and
queries of saved schedules respond immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autosched.cli.output import reported_errors
from autosched.cli.parser import command_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The codes are 0 for success, 1 for a failed check, 2 for wrong usage or input, 130 for
    interrupted.
    """
    arguments = command_parser().parse_args(argv)
    with reported_errors() as outcome:
        outcome.code = arguments.run(arguments)
        sys.stdout.flush()  # errors of a closed pipe are raised here
    return outcome.code
