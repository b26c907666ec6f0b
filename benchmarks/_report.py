"""What the benchmarks share: their options, Markdown tables, and the words for the machine that they ran on."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def options(description: str | None) -> argparse.Namespace:
    """Return the options that every benchmark takes: ``quick`` and ``write``."""
    return parser(description).parse_args()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return what reads them, for a benchmark to add more."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="measure less often, in seconds")
    parser.add_argument(
        "--write", action="store_true", help="write the report to benchmarks/results/"
    )
    return parser


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first stand to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def picture(name: str, about: str, svg: str, chosen: argparse.Namespace) -> Iterator[str]:
    """Write a picture to ``results/<name>.svg``, and yield what shows it in a report, if writing was chosen."""
    if chosen.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.svg").write_text(svg)
        yield f"![{about}]({name}.svg)"


def publish(
    name: str,
    title: str,
    parts: Iterable[str],
    chosen: argparse.Namespace,
    packages: Sequence[str] = ("torch",),
    folder: Path = RESULTS,
) -> None:
    """Print a report, and write it to ``<folder>/<name>.md`` if that was chosen."""
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    used = f"{cores} cores" if usable == cores else f"{usable} of {cores} cores"
    where = f"{used} ({platform.machine()}), Python {platform.python_version()}, {versions}"
    text = "\n\n".join([f"# {title}", *parts, f"Measured on {where}."]) + "\n"
    print(text)
    if chosen.write:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(text)
