"""Build extension modules from C++ files of this package, and load them.

Each is compiled once for each version of Python and of what it includes, and kept in the user's
cache folder. What cannot be compiled has a replacement in Python, so nothing here is necessary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosched._lib.files import user_folder

__all__ = ["described", "is_possible", "loaded"]

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
_SECONDS = 30.0  # a compiler that takes longer is not waited for


def is_possible() -> bool:
    """Whether this Python has a global lock, on which the extension modules rely."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def loaded(
    name: str,
    versions: Sequence[str] = (),
    includes: Sequence[Path] = (),
    libraries: Sequence[str] = (),
) -> Any:
    """Return the extension module that ``name``.cpp defines, compiled if it was not before.

    ``versions`` are those of what it includes from the folders ``includes``; ``libraries`` are
    options of the linker. Raises what compilers, files and imports raise: see ``described``.
    """
    path = _built(name, versions, includes, libraries)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(error: Exception) -> str:
    """Return why a module could not be compiled or loaded: the compiler's first error, if any."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").splitlines()
        return next((line for line in lines if "error" in line), str(error))
    return f"{type(error).__name__}: {error}"


def _built(
    name: str, versions: Sequence[str], includes: Sequence[Path], libraries: Sequence[str]
) -> Path:
    """Return the path of the compiled module. Several processes may compile it at a time."""
    source = _FOLDER / f"{name}.cpp"
    known = *versions, sys.version, _FLAGS
    digest = hashlib.sha256(source.read_bytes() + repr(known).encode()).hexdigest()[:16]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = user_folder() / f"{name}-{digest}{suffix}"
    if target.exists():
        return target
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"there is no {compiler[0]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    options = [f"-I{folder}" for folder in (*includes, sysconfig.get_path("include"))]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        _run([*compiler, *_FLAGS, *options, str(source), *libraries, "-o", str(made)])
        made.replace(target)
    return target


def _run(command: list[str]) -> None:
    """Run a compiler; one that takes too long is killed, with the processes that it started."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
