"""``autosched compare`` plans a graph for many machines and policies."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from autosched.cli.options import NAMES, add_costs, add_search, costs_of, examples_of, gpus, read
from autosched.cli.output import deliver, tracker
from autosched.cli.subject import add_thing, subject
from autosched.comparison.compare import POLICIES as USUAL
from autosched.comparison.compare import compare
from autosched.errors import UsageError
from autosched.machine.machine import LINKS, Machine

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="compare numbers of GPUs, links and policies; nothing runs",
        description="Plan a graph for each machine by each policy, and compare what is predicted. No GPU is needed.",
        epilog="example: autosched compare autosched.demo:averaged_example --gpus 2 4 --links pcie4 nvlink4 -o a.svg",
    )
    add_thing(parser)
    parser.add_argument(
        "--gpus", type=gpus, nargs="+", metavar="N", help="numbers of GPUs (default: 1 2 4 8)"
    )
    parser.add_argument(
        "--links", choices=tuple(LINKS), nargs="+", metavar="LINK", help=f"of {', '.join(LINKS)}"
    )
    parser.add_argument(
        "--machines",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="machines as JSON, beside or instead",
    )
    parser.add_argument(
        "--policies", choices=NAMES, nargs="+", metavar="POLICY", default=USUAL,
        help=f"of {', '.join(NAMES)} (default: {', '.join(USUAL)})",
    )  # fmt: skip
    parser.add_argument(
        "--noise",
        type=_share,
        metavar="SHARE",
        help="as 20%%: also tell what is left of it if all takes more or less",
    )
    parser.add_argument(
        "--format", choices=("text", "json", "svg"), help="default: as FILE is named, or text"
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="as --format json"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it there instead of to stdout"
    )
    add_search(parser)
    add_costs(parser)
    parser.set_defaults(do=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    form = arguments.format or _form(arguments.output)
    found = subject(arguments.thing, arguments.graph)
    costs = costs_of(arguments, found)
    made = compare(
        found.graph,
        _machines(arguments),
        arguments.policies,
        seconds=arguments.seconds,
        seed=arguments.seed,
        costs=costs,
        examples=examples_of(found, costs),
        noise=arguments.noise,
        track=tracker("comparing"),
    )
    deliver({"text": made.__str__, "json": made.to_json, "svg": made.svg}[form](), arguments.output)
    if not made.rows:
        raise UsageError("no machine can run this; the reasons stand above")
    return 0


def _share(text: str) -> float:
    """Parse a share: ``20%`` or ``0.2``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 20%, got {text}")
    return share


def _form(output: Path | None) -> str:
    form = {".txt": "text", ".json": "json", ".svg": "svg"}.get(
        output.suffix.lower() if output else ".txt"
    )
    if form is None:
        raise UsageError(
            f"{output}: no format has this suffix; known are .txt, .json and .svg, or --format"
        )
    return form


def _machines(arguments: argparse.Namespace) -> dict[str, Machine] | list[Machine]:
    files = {path.stem: read(path, Machine.from_json) for path in arguments.machines or ()}
    if files and arguments.gpus is None and arguments.links is None:
        return files
    links = arguments.links or ["pcie4"]
    pairs = product(arguments.gpus or [1, 2, 4, 8], links)
    made = [Machine.emulated(count, link) for count, link in pairs]
    return [*made, *files.values()]
