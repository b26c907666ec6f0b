"""The command line, ``autosched COMMAND``.

loading   what a command works on: a graph or a saved schedule, its machine and its costs
commands  the commands, as functions of parsed arguments
plan      the command ``plan``: does a training step fit?
sanitize  the command ``sanitize``: races in the user's own stream code
output    results, progress and errors

A command is a function from the parsed arguments to an exit code. Commands print, and write the
files that they are asked to write. torch is imported only by commands that need it, so help and
queries of saved schedules respond immediately.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from autosched import __version__
from autosched.cli import commands
from autosched.cli.commands import FORMATS
from autosched.cli.output import WRONG_INPUT, exit_code
from autosched.cli.plan import plan
from autosched.cli.sanitize import sanitize
from autosched.comparison.compare import POLICIES as USUAL_POLICIES
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
    for add_command in _COMMANDS:
        add_command(subparsers)
    return parser


def _command(
    subparsers: Any, run: Callable[[argparse.Namespace], int], what: str, about: str, example: str
) -> argparse.ArgumentParser:
    """Add a command, named as the function that runs it, and return its parser."""
    name = run.__name__
    epilog = f"example: autosched {name} {example}"
    parser: argparse.ArgumentParser
    parser = subparsers.add_parser(name, help=what, description=about, epilog=epilog)
    parser.set_defaults(run=run)
    return parser


def _demo(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.demo,
        "train a two-layer MLP on one CPU and two GPUs, real or emulated",
        "Train a two-layer MLP on digits, compare with the serial run, and draw the schedule.",
        "--epochs 2 --folder pictures",
    )
    add = parser.add_argument
    what = "times through the data (default: 12)"
    add("--epochs", type=_count, default=12, metavar="N", help=what)
    add("--folder", type=Path, default=Path(), help="where to write the pictures (default: here)")


def _devices(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.devices,
        "show the devices that are here, and the links between them",
        "Show torch's devices, and the machine that schedules are made for with --local.",
        "--write m.json && autosched show file.py:build --machine m.json",
    )
    _add_real_gpus(parser)
    add = parser.add_argument
    add("--machine", type=Path, metavar="FILE", help="show this machine instead, measured perhaps")
    add("--write", type=Path, metavar="FILE", help="write it as JSON, to be edited, for --machine")
    _add_json(parser)


def _show(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.show,
        "prove that a schedule cannot race, and show it as text or as a picture",
        "Show a schedule that is proved not to race: what runs where and when, as predicted.",
        "autosched.demo:mlp_step --gpus 2 --format svg -o mlp.svg",
    )
    _add_thing(parser)
    add = parser.add_argument
    add("--format", choices=tuple(FORMATS), help="default: as FILE is named, or text")
    views = dict.fromkeys(view for views in FORMATS.values() for view in views)
    add("--what", choices=tuple(views), help="of what (default: gantt, where it can be)")
    what = "print what is predicted as JSON, as --format json"
    add("--json", action="store_const", const="json", dest="format", help=what)
    _add_output(parser, "write it there instead of to stdout")
    _add_planning(parser)


def _run(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.run,
        "run a schedule, and compare with the serial run; exit with 1 if they differ",
        "Run a schedule here or emulated, and compare with the serial run bit for bit.",
        "autosched.demo:mlp_example --slower 200 --profile",
    )
    _add_thing(parser)
    add = parser.add_argument
    add("--profile", action="store_true", help="measure too, and show it beside what is predicted")
    _add_repeat(parser, 9)
    what = "write the profile there: .json for Perfetto, .html, .svg"
    add("--save", type=Path, metavar="FILE", help=what)
    _add_json(parser)
    _add_planning(parser)


def _explain(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.explain,
        "say why a schedule takes as long as it does, and what would help",
        "Explain a schedule, predicted or measured; or a task: why there, and its waits.",
        "autosched.demo:mlp_example --task sgd_w1",
    )
    _add_thing(parser)
    add = parser.add_argument
    add("--task", metavar="NAME", help="explain this task")
    add("--profile", action="store_true", help="run it, and explain what was measured")
    _add_repeat(parser, 9)
    _add_json(parser)
    _add_planning(parser)


def _compare(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.compare,
        "compare numbers of GPUs, links and policies; nothing runs",
        "Plan a graph for each machine by each policy, and compare. No GPU is needed.",
        "autosched.demo:averaged_example --gpus 2 4 -o a.svg",
    )
    _add_thing(parser)
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+"}
    add("--gpus", type=_gpus, metavar="N", help="numbers of GPUs (default: 1 2 4 8)", **several)
    what = f"of {', '.join(LINKS)}"
    add("--links", choices=tuple(LINKS), metavar="LINK", help=what, **several)
    what = "machines as JSON, beside or instead"
    add("--machines", type=Path, metavar="FILE", help=what, **several)
    what = "limits of memory of each GPU, such as 8GB 16GB: the curve of time against memory"
    add("--memory", type=_nbytes, metavar="BYTES", help=what, **several)
    what = f"of {', '.join(_NAMES)} (default: {', '.join(USUAL_POLICIES)})"
    add("--hosts", type=_hosts, metavar="N", help="numbers of such hosts, on a network", **several)
    add("--network", choices=tuple(NETWORKS), metavar="NAME", help=f"of {', '.join(NETWORKS)}")
    several["default"] = USUAL_POLICIES
    add("--policies", choices=_NAMES, metavar="POLICY", help=what, **several)
    add("--format", choices=("text", "json", "svg"), help="default: as FILE is named, or text")
    add("--json", action="store_const", const="json", dest="format", help="as --format json")
    _add_output(parser, "write it there instead of to stdout")
    _add_search(parser)


def _plan(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        plan,
        "say whether a training step fits into GPUs, and how long it would take",
        "Plan a step for numbers of GPUs, without data: the function makes tensors on meta.",
        "train.py:job --gpus 1 2 4 --memory 24GB",
    )
    add = parser.add_argument
    what = "module:function or file.py:function that returns (step, arguments) or (model, loss, optimizer, batch)"
    add("thing", metavar="FUNCTION", help=what)
    what = "numbers of GPUs (default: 1 2 4)"
    add("--gpus", type=_some_gpus, metavar="N", nargs="+", help=what)
    what = "of each GPU, such as 24GB or 80GiB (default: no limit)"
    add("--memory", type=_nbytes, default=float("inf"), metavar="BYTES", help=what)
    add("--link", choices=tuple(LINKS), metavar="LINK", help=f"of {', '.join(LINKS)}")
    _add_json(parser)


def _sanitize(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        sanitize,
        "find races in code that uses CUDA streams, without a GPU; exit with 1 if there are any",
        "Run a script or function on simulated GPUs, and report what is in no order.",
        "--gpus 2 train.py --epochs 1",
    )
    add = parser.add_argument
    add("--gpus", type=_gpus, metavar="N", help="simulate N GPUs (default: 1)")
    add("--numbers", action="store_true", help="compute numbers on the CPU, not only shapes")
    _add_json(parser)
    add("script", metavar="SCRIPT", help="path/to/script.py, or module:function")
    what = "of the script"
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help=what)


def _measure(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        commands.measure,
        "measure what tasks cost here, for --costs, and how fast links are, for --machine",
        "Measure tasks on each kind of device here, and copies between devices: medians.",
        "autosched.demo:mlp_example -o costs.json --links m.json",
    )
    _add_thing(parser)
    _add_real_gpus(parser)
    _add_repeat(parser, 5)
    _add_output(parser, "write the costs there instead of to stdout")
    add = parser.add_argument
    what = "measure links too, and write the machine there"
    add("--links", type=Path, metavar="FILE", help=what)
    add("--replay", action="store_true", help="what kernels take alone, as CUDA graphs replay them")


# ---- options that several commands have


def _add_thing(parser: argparse.ArgumentParser) -> None:
    what = "module:function or file.py:function, or a saved schedule (plan.json)"
    parser.add_argument("thing", metavar="THING", help=what)
    what = "module:function that builds the graph of a saved schedule"
    parser.add_argument("--graph", metavar="FUNCTION", help=what)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)


def _add_repeat(parser: argparse.ArgumentParser, default: int) -> None:
    what = f"take the median of N runs (default: {default})"
    parser.add_argument("--repeat", type=_count, default=default, metavar="N", help=what)


def _add_real_gpus(parser: argparse.ArgumentParser) -> None:
    what = "use N of the GPUs; more than there are share them"
    parser.add_argument("--gpus", type=_gpus, metavar="N", help=what)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loading.planned``: machine, policy and costs."""
    group = parser.add_argument_group(
        "machine and policy",
        "By default what a saved schedule has, or what the function returns, or 2 emulated GPUs.",
    )
    add = group.add_argument
    add("--gpus", type=_gpus, metavar="N", help="an emulated machine of one CPU and N GPUs")
    what = f"what joins them: {', '.join(LINKS)} (default: pcie4)"
    add("--link", choices=tuple(LINKS), metavar="LINK", help=what)
    add("--hosts", type=_hosts, metavar="N", help="N such hosts, joined by a network")
    what = f"what joins the hosts: {', '.join(NETWORKS)} (default: ethernet100)"
    add("--network", choices=tuple(NETWORKS), metavar="NAME", help=what)
    what = "a machine as JSON, as `autosched devices` writes"
    add("--machine", type=Path, metavar="FILE", help=what)
    add("--local", action="store_true", help="this machine; with --gpus, so many of its GPUs")
    what = "that machine, F times slower, to be emulated by a CPU"
    add("--slower", type=_factor, metavar="F", help=what)
    what = f"{', '.join(_NAMES)} (default: auto)"
    add("--policy", choices=_NAMES, metavar="NAME", help=what)
    _add_search(group)


def _add_search(group: Any) -> None:
    """Add the options of policies that search, and the costs."""
    what = f"look so long for better plans: auto, {', '.join(TIMED)}"
    group.add_argument("--seconds", type=_factor, metavar="S", help=what)
    what = "of what is random (default: 0)"
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help=what)
    what = "runs that may be under way at a time (default: 1, or with --objective period the best)"
    group.add_argument("--in-flight", type=_count, metavar="N", help=what)
    what = "what plans minimize: one run, or the seconds per run of many (default: makespan)"
    group.add_argument("--objective", choices=("makespan", "period"), help=what)
    what = "costs as JSON, as `autosched measure` writes"
    group.add_argument("--costs", type=Path, metavar="FILE", help=what)


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
_some_gpus = partial(_whole, 1, _MOST_GPUS)
_hosts = partial(_whole, 1, _MOST_HOSTS)
_seed = partial(_whole, 0, 2**64 - 1)  # which torch accepts
_COMMANDS = (_demo, _devices, _show, _run, _explain, _compare, _plan, _sanitize, _measure)
