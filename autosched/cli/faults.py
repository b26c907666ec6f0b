"""Report errors as a line on stderr and an exit code.

A traceback is shown only of the user's own functions.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autosched.errors import AutoschedError

__all__ = ["Outcome", "TheirError", "say", "told"]

CHECK_FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_FRAMES = 5  # of a traceback that are shown


class TheirError(Exception):
    """Raised from the error of a user's own function."""


@dataclass
class Outcome:
    """The exit code of a command."""

    code: int = WRONG_INPUT


@contextlib.contextmanager
def told() -> Iterator[Outcome]:
    """Print errors and warnings as a line on stderr, and set the exit code."""
    outcome = Outcome()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            yield outcome
    except TheirError as error:
        outcome.code = WRONG_INPUT
        _show_theirs(error)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise the interpreter reports an error at exit
        outcome.code = PIPE_CLOSED
    except AutoschedError as error:
        outcome.code = WRONG_INPUT
        say(str(error))
    except OSError as error:
        outcome.code = WRONG_INPUT
        say(
            f"{error.filename}: {error.strerror}"
            if error.filename and error.strerror
            else str(error)
        )
    except KeyboardInterrupt:
        outcome.code = INTERRUPTED
        say("interrupted")


def say(text: str) -> None:
    """Write a line to stderr."""
    print(f"autosched: {text}", file=sys.stderr)


def _show_theirs(error: TheirError) -> None:
    """Print what failed, where in the user's code, and how."""
    cause = error.__cause__
    assert cause is not None
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen"))
    ]
    say(str(error))
    sys.stderr.write("".join(traceback.format_list(frames[-_FRAMES:])))
    sys.stderr.write("".join(traceback.format_exception_only(cause)))
