"""Run the command sanitize, which finds races in a script or function that uses CUDA streams."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from autosched.cli.loading import returned
from autosched.cli.output import CHECK_FAILED, UserCodeError, json_text
from autosched.errors import UsageError


def sanitize(arguments: argparse.Namespace) -> int:
    """Run a script or function on simulated GPUs, and print what is found."""
    from autosched.sanitizer import watching

    is_script = arguments.script.endswith(".py")
    if is_script and not Path(arguments.script).is_file():
        raise UsageError(f"{arguments.script}: no such file")
    if not is_script and arguments.arguments:
        raise UsageError(f"{arguments.script} is a function, which is called without arguments")
    with watching(arguments.gpus or 1, arguments.numbers) as watched:
        if is_script:
            _run(arguments.script, arguments.arguments)
        else:
            returned(arguments.script)
    report = watched.report
    print(json_text(report.to_json()) if arguments.json else report)
    return CHECK_FAILED if report.findings else 0


def _run(script: str, arguments: list[str]) -> Any:
    """Run a script as Python does, with its arguments; what it prints goes to stderr."""
    before, path, output = sys.argv, list(sys.path), sys.stdout
    sys.argv, sys.stdout = [script, *arguments], sys.stderr
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise UserCodeError(f"{script} exits with {exit_.code}") from exit_
    except Exception as error:
        raise UserCodeError(f"{script} failed") from error
    finally:
        sys.argv, sys.path[:], sys.stdout = before, path, output
