"""The command line, ``autosched COMMAND``.

commands  the commands, as functions of parsed arguments, and what they work on
plan      the command ``plan``: does a training step fit?
output    results, progress and errors

A command is a function from the parsed arguments to an exit code. Commands print, and write the
files that they are asked to write. torch is imported only by commands that need it, so help and
queries of saved schedules respond immediately.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autosched import __version__
from autosched.cli import commands
from autosched.cli.commands import FORMATS
from autosched.cli.output import WRONG_INPUT, exit_code
from autosched.cli.plan import plan
from autosched.comparison import POLICIES as USUAL_POLICIES
from autosched.machine.device import NETWORKS
from autosched.machine.machine import LINKS
from autosched.policies import POLICIES, TIMED

__all__ = ["command_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The codes are 0 for success, 1 for a failed check, 2 for wrong usage or input, 130 for
    interrupted.
    """
    arguments = command_parser().parse_args(argv)

    def command() -> int:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # errors of a closed pipe are raised here
        return code

    return exit_code(command)


_DESCRIPTION = """\
Schedule task graphs of tensor work on many devices: see, prove, run and compare the schedules."""
_EPILOG = """\
THING is the function that builds a graph: package.module:function or path/to/file.py:function. It
returns a Graph, or (Graph, inputs), or (Graph, inputs, Machine). Or it is a saved schedule of such a
graph: plan.json --graph package.module:function.

examples:
  autosched demo
  autosched show autosched.demo:mlp_step --gpus 2 --format svg -o mlp.svg
  autosched compare autosched.demo:averaged_example --gpus 2 4 --links pcie4 nvlink4

exit codes: 0 good, 1 a check failed, 2 wrong usage or input, 130 interrupted
"""
_MOST_GPUS = 256  # all are linked to each other
_MOST_HOSTS = 4096
_NAMES = ("auto", *TIMED, *POLICIES)  # of policies


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the lines of examples whole, and reports errors in one line."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Report an error, and where help is."""
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog="autosched", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"autosched {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for command in _COMMANDS:
        name = command.run.__name__
        epilog = f"example: autosched {name} {command.example}"
        about = f"{command.what[0].upper()}{command.what[1:]}."
        own = subparsers.add_parser(name, help=command.what, description=about, epilog=epilog)
        own.set_defaults(run=command.run)
        _add_options(own, command.options)
        if command.plans:
            _add_options(own.add_argument_group("machine and policy", _ABOUT_PLANNING), _PLANNING)
    return parser


def _add_options(parser: Any, options: Options) -> None:
    """Add options with these texts; those with a plus take several values."""
    for option, about in options.items():
        name = option.removesuffix(" +")
        text, kind = (about, _KINDS.get(name, _FLAG)) if isinstance(about, str) else about
        several = {} if name == option else {"nargs": "+"}
        parser.add_argument(*name.split(), **kind, **several, help=text)


# ---- values of options


def _nbytes(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([kMGT]i?)?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be bytes such as 24GB or 80GiB, got {text!r}")
    number, unit = found.groups(default="")
    base = 1024.0 if unit.endswith("i") else 1000.0
    return float(_factor(number) * base ** " kMGT".index(unit[:1] or " "))


def _whole(least: int, most: int | None, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {number}")
    return number


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


_count = partial(_whole, 1, None)
_gpus = partial(_whole, 0, _MOST_GPUS)
_hosts = partial(_whole, 1, _MOST_HOSTS)
_seed = partial(_whole, 0, 2**64 - 1)  # which torch accepts

# ---- the commands and their options

Kind = Mapping[str, Any]
Options = Mapping[str, str | tuple[str, Kind]]  # texts, and kinds that are not as in ``_KINDS``

_FLAG: Kind = {"action": "store_true"}
_FILE: Kind = {"type": Path, "metavar": "FILE"}
_LINK: Kind = {"choices": tuple(LINKS), "metavar": "LINK"}
_COUNT: Kind = {"type": _count, "metavar": "N"}
_VIEWS = dict.fromkeys(view for views in FORMATS.values() for view in views)
_KINDS: Mapping[str, Kind] = {  # of all options but flags
    **dict.fromkeys(("-o --output", "--machine", "--machines", "--costs"), _FILE),
    **dict.fromkeys(("--write", "--save"), _FILE),
    **dict.fromkeys(("--link", "--links"), _LINK),
    **dict.fromkeys(("--repeat", "--in-flight"), _COUNT),
    "thing": {"metavar": "THING"},
    "--graph": {"metavar": "FUNCTION"},
    "--task": {"metavar": "NAME"},
    "--gpus": {"type": _gpus, "metavar": "N"},
    "--hosts": {"type": _hosts, "metavar": "N"},
    "--network": {"choices": tuple(NETWORKS), "metavar": "NAME"},
    "--memory": {"type": _nbytes, "metavar": "BYTES"},
    "--slower": {"type": _factor, "metavar": "F"},
    "--seconds": {"type": _factor, "metavar": "S"},
    "--seed": {"type": _seed, "metavar": "N", "default": 0},
    "--policy": {"choices": _NAMES, "metavar": "NAME"},
    "--policies": {"choices": _NAMES, "metavar": "POLICY", "default": USUAL_POLICIES},
    "--objective": {"choices": ("makespan", "period")},
    "--format": {"choices": tuple(FORMATS)},
    "--what": {"choices": tuple(_VIEWS)},
}
_THING: Options = {
    "thing": "module:function or file.py:function, or a saved schedule (plan.json)",
    "--graph": "module:function that builds the graph of a saved schedule",
}
_OUTPUT: Options = {"-o --output": "write it there instead of to stdout"}
_REAL_GPUS: Options = {"--gpus": "use N of the GPUs; more than there are share them"}
_JSON: Options = {"--json": "print JSON"}
_MANY = "runs that may be under way at a time (default: 1, or with --objective period the best)"
_SEARCH: Options = {  # of policies that search, and the costs
    "--seconds": f"look so long for better plans: auto, {', '.join(TIMED)}",
    "--seed": "of what is random (default: 0)",
    "--in-flight": _MANY,
    "--objective": "what plans minimize: one run, or the seconds per run of many (default: makespan)",
    "--costs": "costs as JSON, as `autosched measure` writes",
}
_ABOUT_PLANNING = (
    "By default what a saved schedule has, or what the function returns, or 2 emulated GPUs."
)
_PLANNING: Options = {  # of ``commands.planned``
    "--gpus": "an emulated machine of one CPU and N GPUs",
    "--link": f"what joins them: {', '.join(LINKS)} (default: pcie4)",
    "--hosts": "N such hosts, joined by a network",
    "--network": f"what joins the hosts: {', '.join(NETWORKS)} (default: ethernet100)",
    "--machine": "a machine as JSON, as `autosched devices` writes",
    "--local": "this machine; with --gpus, so many of its GPUs",
    "--slower": "that machine, F times slower, to be emulated by a CPU",
    "--policy": f"{', '.join(_NAMES)} (default: auto)",
    **_SEARCH,
}


class _Command(NamedTuple):
    """A command, named as the function that runs it; ``plans``: it has the options of plans, too."""

    run: Callable[[argparse.Namespace], int]
    what: str
    example: str
    options: Options
    plans: bool = False


_COMMANDS = (
    _Command(
        commands.demo,
        "train a two-layer MLP on one CPU and two GPUs, real or emulated",
        "--epochs 2 --folder pictures",
        {
            "--epochs": ("times through the data (default: 12)", {**_COUNT, "default": 12}),
            "--folder": (
                "where to write the pictures (default: here)",
                {"type": Path, "default": Path()},
            ),
        },
    ),
    _Command(
        commands.devices,
        "show the devices that are here, and the links between them",
        "--write m.json && autosched show file.py:build --machine m.json",
        {
            **_REAL_GPUS,
            "--machine": "show this machine instead, measured perhaps",
            "--write": "write it as JSON, to be edited, for --machine",
            **_JSON,
        },
    ),
    _Command(
        commands.show,
        "prove that a schedule cannot race, and show it as text or as a picture",
        "autosched.demo:mlp_step --gpus 2 --format svg -o mlp.svg",
        {
            **_THING,
            "--format": "default: as FILE is named, or text",
            "--what": "of what (default: gantt, where it can be)",
            "--json": "print what is predicted as JSON, as --format json",
            **_OUTPUT,
        },
        plans=True,
    ),
    _Command(
        commands.run,
        "run a schedule, and compare with the serial run; exit with 1 if they differ",
        "autosched.demo:mlp_example --slower 200 --profile",
        {
            **_THING,
            "--profile": "measure too, and show it beside what is predicted",
            "--repeat": "take the median of N runs (default: 9)",
            "--save": "write the profile there: .json for Perfetto, .html, .svg",
            **_JSON,
        },
        plans=True,
    ),
    _Command(
        commands.explain,
        "say why a schedule takes as long as it does, and what would help",
        "autosched.demo:mlp_example --task sgd_w1",
        {
            **_THING,
            "--task": "explain this task",
            "--profile": "run it, and explain what was measured",
            "--repeat": "take the median of N runs (default: 9)",
            **_JSON,
        },
        plans=True,
    ),
    _Command(
        commands.compare,
        "compare numbers of GPUs, links and policies; nothing runs",
        "autosched.demo:averaged_example --gpus 2 4 -o a.svg",
        {
            **_THING,
            "--gpus +": "numbers of GPUs (default: 1 2 4 8)",
            "--links +": f"of {', '.join(LINKS)}",
            "--machines +": "machines as JSON, beside or instead",
            "--memory +": "limits of each GPU, such as 8GB 16GB: the curve of time against memory",
            "--hosts +": "numbers of such hosts, on a network",
            "--network": f"of {', '.join(NETWORKS)}",
            "--policies +": f"of {', '.join(_NAMES)} (default: {', '.join(USUAL_POLICIES)})",
            "--format": (
                "default: as FILE is named, or text",
                {"choices": ("text", "json", "svg")},
            ),
            "--json": "as --format json",
            **_OUTPUT,
            **_SEARCH,
        },
    ),
    _Command(
        plan,
        "say whether a training step fits into GPUs, and how long it would take",
        "train.py:job --gpus 1 2 4 --memory 24GB",
        {
            "thing": (
                "module:function or file.py:function that returns (step, arguments) or "
                "(model, loss, optimizer, batch); it makes tensors on torch's device meta",
                {"metavar": "FUNCTION"},
            ),
            "--gpus +": (
                "numbers of GPUs (default: 1 2 4)",
                {"type": partial(_whole, 1, _MOST_GPUS), "metavar": "N"},
            ),
            "--memory": (
                "of each GPU, such as 24GB or 80GiB (default: no limit)",
                {"type": _nbytes, "metavar": "BYTES", "default": float("inf")},
            ),
            "--link": f"of {', '.join(LINKS)}",
            **_JSON,
        },
    ),
    _Command(
        commands.sanitize,
        "find races in code that uses CUDA streams, without a GPU; exit with 1 if there are any",
        "--gpus 2 train.py --epochs 1",
        {
            "--gpus": "simulate N GPUs (default: 1)",
            "--numbers": "compute numbers on the CPU, not only shapes",
            **_JSON,
            "script": ("path/to/script.py, or module:function", {"metavar": "SCRIPT"}),
            "arguments": ("of the script", {"metavar": "ARGUMENT", "nargs": argparse.REMAINDER}),
        },
    ),
    _Command(
        commands.measure,
        "measure what tasks cost here, for --costs, and how fast links are, for --machine",
        "autosched.demo:mlp_example -o costs.json --links m.json",
        {
            **_THING,
            **_REAL_GPUS,
            "--repeat": "take the median of N runs (default: 5)",
            **_OUTPUT,
            "--links": ("measure links too, and write the machine there", _FILE),
            "--replay": "what kernels take alone, as CUDA graphs replay them",
        },
    ),
)
