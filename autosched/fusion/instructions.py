"""Find out which vector instructions the C++ compiler can use, while something else is done.

Inductor compiles and loads a test program for each set of instructions, when a process first
generates code for a CPU. It takes five seconds, in which the process only waits. Here a thread does
that during the capture, the plan and the first traces.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

__all__ = ["begin_probes", "probes_awaited"]

_begun: list[threading.Thread] = []


def begin_probes() -> None:
    """Start the thread, once in a process.

    It ends by itself; where Inductor is missing, nothing is started.
    """
    if _begun:
        return
    try:
        # What the thread needs is imported here: imports in two threads see each other's halves.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401
        from torch.utils import _filelock  # noqa: F401
    except ImportError:
        return
    thread = threading.Thread(
        target=_probe, args=(cpu_vec_isa.valid_vec_isa_list,), name="autosched-isa", daemon=True
    )
    _begun.append(thread)
    thread.start()


def _probe(find: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):  # it is raised again where the result is needed
        find()


@contextlib.contextmanager
def probes_awaited() -> Iterator[None]:
    """Let Inductor wait for the thread, if there is one, and use what it found."""
    from torch._inductor import cpu_vec_isa

    find = cpu_vec_isa.valid_vec_isa_list

    @functools.wraps(find)
    def found() -> Any:
        for thread in _begun:
            thread.join()
        return find()

    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", found):
        yield
