"""The Backend protocol, and the table of available backends.

    host          runs each instruction immediately, in the calling thread, in issue order
    threads       one thread for each CPU stream
    emulated      any machine, emulated in real time by CPU threads that take the modelled seconds
    virtual       any machine in virtual time and one thread, in any chosen interleaving
    accelerator   torch streams and events: CUDA, XPU and other accelerators
    replay        as accelerator; a run is recorded once and then replayed: CUDA graphs

A backend knows streams, events and memory. It does not know tasks, graphs or policies. Its methods
are called once, when a program is compiled, and return *steps*: functions without arguments that
the executor calls in every run, in the thread that issues the stream. ``None`` instead of a step
means that there is nothing to do.

On every backend, a wait takes effect only if it is issued after its event was recorded, because
CUDA ignores a wait for an event that was not recorded.

To add a backend, write an object with these methods and pass it as ``backend=``. An entry in
``BACKENDS`` gives it a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from autosched.errors import ScheduleError
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Stream
from autosched.runtime.threads.tapes import Step, Team

__all__ = ["BACKENDS", "Backend", "Step", "Transfer", "make"]

Transfer = Callable[[Any, Any], Any]  # (source, destination or None) -> the copy


@runtime_checkable
class Backend(Protocol):
    """The methods of a backend, in the order in which they are called."""

    def open(self, program: Program, machine: Machine) -> None:
        """Acquire the resources that the program needs. Raises MachineError for missing devices."""

    def place(self, device: str) -> Any:
        """Return the ``.device`` of tensors on a device, or None where any is accepted."""

    def thread(self, stream: Stream) -> str | None:
        """Return the name of the thread that issues a stream; None for the calling thread."""

    def crew(self, threads: Sequence[str]) -> Team:
        """Return the team that runs steps in these threads."""

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Make streams current in their thread, so that the next work is issued to them."""

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Issue a call to streams; ``seconds`` is its modelled duration."""

    def transfer(self, copy: Copy) -> Transfer:
        """Return the function that copies a tensor between two devices."""

    def record(self, stream: Stream, event: int) -> Step | None:
        """Record an event. The executor makes sure that this is issued before the event's waits."""

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Make a stream wait for an event."""

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Return what to do with memory that is freed, before its last reference is dropped."""

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Return a function that marks a moment on streams.

        Without streams, in the calling thread.
        """

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start a run; ``stopped()`` says whether it has been aborted in the meantime."""

    def join(self) -> None:
        """End a run: return when the caller may use its outputs."""

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Pass outputs to the caller, after ``join``.

        The caller's streams now decide when their memory is freed.
        """

    def seconds(self, stamp: Any) -> float:
        """Return the time of a stamp in seconds after ``begin``; valid after ``join``."""

    def close(self) -> None:
        """Release all resources."""


BACKENDS = {
    "host": "autosched.runtime.backends.host:Host",
    "threads": "autosched.runtime.backends.threads:Threads",
    "emulated": "autosched.runtime.backends.emulated:Emulated",
    "virtual": "autosched.runtime.backends.virtual:Virtual",
    "accelerator": "autosched.runtime.backends.accelerator:Accelerator",
    "replay": "autosched.runtime.replay.cuda_graphs:Replay",
}


def make(name: str) -> Backend:
    """Return a new backend by name. Raises ScheduleError for unknown names."""
    check_name(name)
    module, _, kind = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), kind)()
    return backend


def check_name(name: str) -> None:
    """Raise ScheduleError unless a backend has this name."""
    if name not in BACKENDS:
        raise ScheduleError(f"unknown backend {name!r}; known are {', '.join(map(repr, BACKENDS))}")


def suited(machine: Machine) -> str:
    """Return the name of the backend that fits a machine."""
    if machine.imagined:
        return "emulated"
    return "threads" if all(device.kind == "cpu" for device in machine.devices) else "accelerator"
