"""The command line: ``autosched --version``, ``autosched demo``. Prints, and writes files where it is told to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from autosched.errors import AutoschedError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 good, 1 a check failed, 2 wrong usage or input."""
    parser = argparse.ArgumentParser(
        prog="autosched", description="Schedule task graphs of tensor work on many devices."
    )
    parser.add_argument("--version", action="version", version=f"autosched {version('autosched')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a two-layer MLP on one CPU and two GPUs, real or emulated")
    demo.add_argument("--epochs", type=_count, default=12, help="how often to go through the data (default: 12)")
    demo.add_argument("--folder", type=Path, default=Path(), help="where to write the pictures (default: here)")
    arguments = parser.parse_args(argv)
    try:
        return _demo(arguments)
    except (AutoschedError, OSError) as error:
        print(f"autosched: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _demo(arguments: argparse.Namespace) -> int:
    from autosched.demo import main as demo

    arguments.folder.mkdir(parents=True, exist_ok=True)
    return demo(arguments.epochs, arguments.folder)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
