"""The command line, ``autosched COMMAND``.

Each command is a module with a function ``add(commands)``, which adds it to the parser and sets the
function that runs it, from the parsed arguments to an exit code. To add a command, write such a
module and list it in ``COMMANDS``. Commands print, and write the files that they are asked to
write. torch is imported only by commands that need it, so help and queries of saved schedules
respond immediately.

==========  ===================================================
module      contents
==========  ===================================================
subject     what a command works on: a saved schedule or a graph
options     machine, policy and costs, as options
output      where results go, and progress of long work
faults      how errors are reported
==========  ===================================================
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from autosched import __version__
from autosched.cli.faults import WRONG_INPUT, told

__all__ = ["main"]

COMMANDS = (
    "demo",
    "devices",
    "show",
    "predict",
    "run",
    "explain",
    "compare",
    "measure",
)  # modules; the order of the help

_EPILOG = """\
THING is a saved schedule (plan.json), or the function that builds a graph: package.module:function or
path/to/file.py:function. It returns a Graph, or (Graph, inputs), or (Graph, inputs, Machine).

examples:
  autosched demo
  autosched show autosched.demo:mlp_step --gpus 2 --format svg -o mlp.svg
  autosched compare autosched.demo:averaged_example --gpus 2 4 --links pcie4 nvlink4

exit codes: 0 good, 1 a check failed, 2 wrong usage or input, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The codes are 0 for success, 1 for a failed check, 2 for wrong usage or input, 130 for
    interrupted.
    """
    arguments = _parser().parse_args(argv)
    with told() as outcome:
        outcome.code = arguments.do(arguments)
        sys.stdout.flush()  # errors of a closed pipe are raised here
    return outcome.code


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of examples whole, and reports errors in one line."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Report an error, and where help is."""
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autosched",
        description="Schedule task graphs of tensor work on many devices: see, prove, run and compare the schedules.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"autosched {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name in COMMANDS:
        import_module(f"autosched.cli.{name}").add(commands)
    return parser
