"""``autosched demo`` runs the demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autosched.cli.options import count

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo",
        help="train a two-layer MLP on one CPU and two GPUs, real or emulated",
        description="Train a two-layer MLP on handwritten digits, compare with the serial run, and draw the schedule.",
        epilog="example: autosched demo --epochs 2 --folder pictures",
    )
    parser.add_argument(
        "--epochs", type=count, default=12, metavar="N", help="times through the data (default: 12)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where to write the pictures (default: here)"
    )
    parser.set_defaults(do=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from autosched.demo import main as demo

    arguments.folder.mkdir(parents=True, exist_ok=True)
    return demo(arguments.epochs, arguments.folder)
