"""Find out which vector instructions the C++ compiler can use, while something else is done.

Inductor compiles and loads a test program for each set of instructions, when a process first
generates code for a CPU. It takes five seconds, in which the process only waits. Here a thread does
that during the capture, the plan and the first traces.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

from autosched._lib.forks import forks

__all__ = ["begin_probes"]

_LOCK = threading.Lock()
_begun: list[threading.Thread] = []


def begin_probes() -> None:
    """Start the thread, once in a process; until it ends, Inductor waits for it.

    It has the settings of Inductor that are in force here. Where Inductor, or the function that
    probes, is missing, nothing is started.
    """
    try:
        # What the thread needs is imported here: imports in two threads see each other's halves.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401
        from torch.utils import _filelock  # noqa: F401

        find = cpu_vec_isa.valid_vec_isa_list
    except (ImportError, AttributeError):
        return

    ended = threading.Event()
    process = forks()

    @functools.wraps(find)
    def awaited() -> Any:
        if forks() == process:  # a child process has no such thread
            ended.wait()
        return find()

    def probe() -> None:
        try:
            with contextlib.suppress(Exception):  # it is raised again where the result is needed
                find()
        finally:
            _replace(cpu_vec_isa, awaited, find)
            ended.set()

    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(probe,), name="autosched-isa", daemon=True)
    with _LOCK:
        if _begun:
            return
        _begun.append(thread)
        _replace(cpu_vec_isa, find, awaited)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads
            _replace(cpu_vec_isa, awaited, find)
            ended.set()


def _replace(module: Any, old: Callable[[], Any], new: Callable[[], Any]) -> None:
    if module.valid_vec_isa_list is old:
        module.valid_vec_isa_list = new
