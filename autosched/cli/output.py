"""Write results of commands, and show the progress of long work.

Progress bars are for people: they are printed to stderr, and only to a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from autosched._lib.files import write
from autosched.errors import UsageError

__all__ = ["coloured", "deliver", "json_text", "tracker", "width"]


def deliver(result: str | bytes, path: Path | None) -> None:
    """Write a result to a file, completely or not at all, or to stdout.

    Raises UsageError for bytes on a terminal.
    """
    if path is not None:
        write(path, result)
        print(f"wrote {path}", file=sys.stderr)
    elif isinstance(result, str):
        print(result.removesuffix("\n"))
    elif sys.stdout.isatty():
        raise UsageError("this is no text, and stdout is a terminal; give -o FILE")
    else:
        sys.stdout.buffer.write(result)


def json_text(document: Any) -> str:
    """Return a document as JSON for scripts."""
    return json.dumps(document, indent=2)


def width() -> int:
    """Return the columns of the terminal; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def coloured() -> bool:
    """Whether stdout is a terminal with colours that the user allows (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def tracker(what: str) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Return a function that iterates and shows progress, with tqdm in a terminal."""
    if not sys.stderr.isatty():
        return iter
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return partial(_counted, what)
    return partial(tqdm, desc=what, leave=False)


def _counted(what: str, items: Sequence[Any]) -> Iterable[Any]:
    for i, item in enumerate(items, 1):
        print(f"\r{what}: {i} of {len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    print("\r\033[K", end="", file=sys.stderr, flush=True)
