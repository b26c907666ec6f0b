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

Transfer = Callable[[Any, Any], Any]  # (what to copy, what to overwrite or None) -> the copy


@runtime_checkable
class Backend(Protocol):
    """The methods of a backend, in the order in which they are called."""

    def open(self, program: Program, machine: Machine) -> None:
        """Acquire what the program needs. Raises MachineError for devices that are not there."""

    def place(self, device: str) -> Any:
        """Return what ``.device`` tensors on a device have, or None where it does not matter."""

    def thread(self, stream: Stream) -> str | None:
        """Return which thread issues a stream, by any name; None for the thread that calls the schedule."""

    def crew(self, threads: Sequence[str]) -> Team:
        """Return what runs steps in these threads."""

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Make streams current in their thread, so that what comes next is put on them."""

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Put a call on streams; ``seconds`` is what it is modelled to take."""

    def transfer(self, copy: Copy) -> Transfer:
        """Return the function that copies a tensor between two devices."""

    def record(self, stream: Stream, event: int) -> Step | None:
        """Record an event. That it was issued before its waits is the executor's part."""

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Hold a stream back until an event has happened."""

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Return what to do with memory that goes back, before its last reference is dropped."""

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Return a function that marks a moment on streams that meet; on none, for the thread that calls it."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start a run; ``stopped()`` says whether it has been given up meanwhile."""

    def join(self) -> None:
        """End a run: return when its outputs may be used by the caller."""

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Make outputs the caller's, after ``join``: what becomes of their memory is up to the caller's streams now."""

    def seconds(self, stamp: Any) -> float:
        """Return how long after ``begin`` a stamp was made; valid after ``join``."""

    def close(self) -> None:
        """Give everything back."""


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
