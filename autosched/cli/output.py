"""Write results of commands, show progress, and report errors.

Progress bars are for people: they are printed to stderr, and only to a terminal. An error is a line
on stderr and an exit code; a traceback is shown only of the user's own functions.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autosched._lib.files import write
from autosched.errors import AutoschedError, ProgramError, UsageError

CHECK_FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_FRAMES = 5  # of a traceback that are shown


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


def say(text: str) -> None:
    """Write a line to stderr."""
    print(f"autosched: {text}", file=sys.stderr)


# ---- terminals


def width() -> int:
    """Return the columns of the terminal; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def has_colours() -> bool:
    """Whether stdout is a terminal with colours that the user allows (https://no-color.org)."""
    forbidden = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not forbidden


def tracker(what: str) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Return a function that iterates and counts in a terminal."""

    def counted(items: Sequence[Any]) -> Iterator[Any]:
        for i, item in enumerate(items, 1):
            print(f"\r{what}: {i} of {len(items)}", end="", file=sys.stderr, flush=True)
            yield item
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    return counted if sys.stderr.isatty() else iter


# ---- errors


class UserCodeError(Exception):
    """Raised from the error of a user's own function."""


def exit_code(command: Callable[[], int]) -> int:
    """Return the exit code of a command; print errors and warnings as a line on stderr."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            return command()
    except UserCodeError as error:
        _report_user_code(error)
    except BrokenPipeError:
        # Otherwise the interpreter reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except AutoschedError as error:
        say(str(error))
        faults = error, error.__cause__  # a saved program that is not proved is a cause
        if any(isinstance(fault, ProgramError) for fault in faults):
            return CHECK_FAILED
    except OSError as error:
        known = error.filename and error.strerror
        say(f"{error.filename}: {error.strerror}" if known else str(error))
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    return WRONG_INPUT


def _report_user_code(error: UserCodeError) -> None:
    cause = error.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen"))]
    say(str(error))
    sys.stderr.write("".join(traceback.format_list(theirs[-_FRAMES:])))
    sys.stderr.write("".join(traceback.format_exception_only(cause)))
