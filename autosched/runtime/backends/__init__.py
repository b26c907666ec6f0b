"""The Backend protocol, its optional capabilities, and the table of backends.

    host          runs each instruction immediately, in the calling thread, in issue order
    threads       one thread for each CPU stream
    emulated      any machine, emulated in real time by CPU threads that take the modelled seconds
    virtual       any machine in virtual time and one thread, in any chosen interleaving
    accelerator   torch streams and events: CUDA, XPU and other accelerators
    ranks         one rank of ``Machine.cluster``, and copies to and from others
    replay        as accelerator; a run is recorded once and then replayed: CUDA graphs

A backend knows streams, events and memory. It does not know tasks, graphs or policies. Most of its
methods are called once, when a program is compiled, and return *steps*: functions without arguments
that the executor calls in every run, in the thread that issues the stream. ``None`` instead of a
step means that there is nothing to do.

On every backend, a wait takes effect only if it is issued after its event was recorded, because
CUDA ignores a wait for an event that was not recorded.

To add a backend, write an object with the methods of ``Backend``, and of those capabilities that it
has, and pass it as ``backend=``. An entry in ``BACKENDS`` gives it a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from autosched.codegen.threads import Yields
from autosched.errors import ScheduleError
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Receive, Send, Stream
from autosched.runtime.threads.runs import Step
from autosched.runtime.threads.team import ThreadTeam

if TYPE_CHECKING:
    from autosched.runtime.replay.cuda_graphs import Replay

__all__ = [
    "BACKENDS",
    "Backend",
    "Bracketed",
    "Capabilities",
    "Choosing",
    "Entered",
    "Exchanging",
    "Freeing",
    "HandsOut",
    "Located",
    "Looping",
    "Step",
    "Threaded",
    "Timed",
    "Transfer",
    "make",
]

Transfer = Callable[[Any, Any], Any]  # (source, destination or None) -> the copy


@runtime_checkable
class Backend(Protocol):
    """The methods of every backend, in the order in which they are called."""

    def open(self, program: Program, machine: Machine) -> None:
        """Acquire the resources that the program needs. Raises MachineError for missing devices."""

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Issue a call to streams; ``seconds`` is its modelled duration."""

    def transfer(self, copy: Copy) -> Transfer:
        """Return the function that copies a tensor between two devices.

        From a storage device it is given a ``StoredTensor``, and reads that.
        """

    def record(self, stream: Stream, event: int) -> Step | None:
        """Record an event. The executor makes sure that this is issued before the event's waits."""

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Make a stream wait for an event."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start a run; ``stopped()`` says whether it has been aborted in the meantime."""

    def join(self) -> None:
        """End a run: return when the caller may use its outputs."""

    def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class Threaded(Protocol):
    """Issues streams from several threads. Others issue all from the calling thread."""

    def thread(self, stream: Stream) -> str | None:
        """Return the name of the thread that issues a stream; None for the calling thread."""

    def team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team with these threads; None is one that issues what the calling one would."""


@runtime_checkable
class Choosing(Protocol):
    """Executes all threads in turn, in one; its teams get generators."""

    yields: Yields

    def choose(self, ready: list[str]) -> str:
        """Return the thread that continues, of those that can."""


@runtime_checkable
class Located(Protocol):
    """Has tensors on devices. Others accept tensors on any device."""

    def place(self, device: str) -> Any:
        """Return the ``.device`` of tensors on a device, or None where any is accepted."""


@runtime_checkable
class Entered(Protocol):
    """Issues work to the current streams of a thread."""

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Make streams current in their thread, so that the next work is issued to them."""


@runtime_checkable
class Freeing(Protocol):
    """Acts on memory that is freed. With others, dropping the last reference is all."""

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Return what to do with memory that is freed, before its last reference is dropped."""


@runtime_checkable
class HandsOut(Protocol):
    """Prepares outputs for the caller."""

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Pass outputs to the caller, after ``join``.

        The caller's streams now decide when their memory is freed.
        """


@runtime_checkable
class Exchanging(Protocol):
    """Sends values to other ranks, and receives from them."""

    def exchange(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value."""

    def ending(self, thread: str | None) -> Step | None:
        """Return what a thread does at the end of a run: wait for its sends and receives."""


@runtime_checkable
class Timed(Protocol):
    """Measures times. Only such backends can be profiled."""

    @property
    def doubt(self) -> float:
        """The bound, in seconds, on the error of ``seconds``."""

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Return a function that marks a moment on streams.

        Without streams, in the calling thread.
        """

    def seconds(self, stamp: Any) -> float:
        """Return the time of a stamp in seconds after ``begin``; valid after ``join``."""


@runtime_checkable
class Looping(Protocol):
    """Executes several runs of a program at the same time."""

    def slot(self) -> Backend:
        """Return a backend on the same streams, for one run at a time.

        Its events are its own, and ``begin`` and ``join`` concern its runs only. ``begin`` is
        called in the thread that submits a run, while earlier runs execute; ``join`` when all steps
        of the run have been called, in any thread.
        """

    def adopting(self) -> Step:
        """Return a step that makes, in its thread, those streams current that are current here."""


@runtime_checkable
class Bracketed(Protocol):
    """A slot of a backend whose devices go on when the steps of a run have been called.

    ``join`` blocks until they have finished the run.
    """

    def follow(self, stream: Stream) -> Step:
        """Return the first step of a run on a stream: wait for the caller's work at ``begin``."""

    def leave(self, stream: Stream) -> Step:
        """Return the last step of a run on a stream."""


class Capabilities:
    """The optional capabilities of a backend, detected once; None for each that it lacks."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.threaded = backend if isinstance(backend, Threaded) else None
        self.choosing = backend if isinstance(backend, Choosing) else None
        self.located = backend if isinstance(backend, Located) else None
        self.entered = backend if isinstance(backend, Entered) else None
        self.freeing = backend if isinstance(backend, Freeing) else None
        self.exchanging = backend if isinstance(backend, Exchanging) else None
        self.hands_out = backend if isinstance(backend, HandsOut) else None
        self.timed = backend if isinstance(backend, Timed) else None
        # Only one backend records what steps issue to devices, and replays it.
        recording: Any = backend if hasattr(backend, "recorder") else None
        self.replayable: Replay | None = recording
        self.looping = backend if isinstance(backend, Looping) else None
        self.bracketed = backend if isinstance(backend, Bracketed) else None

    def thread(self, stream: Stream) -> str | None:
        """Return the name of the thread that issues a stream; None for the calling thread."""
        return None if self.threaded is None else self.threaded.thread(stream)

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Return the step that makes streams current, if the backend has current streams."""
        return None if self.entered is None else self.entered.enter(streams)

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Return what the backend does to memory that is freed."""
        return None if self.freeing is None else self.freeing.free(stream)


BACKENDS = {
    "host": "autosched.runtime.backends.host:Host",
    "threads": "autosched.runtime.backends.threads:Threads",
    "emulated": "autosched.runtime.backends.emulated:Emulated",
    "virtual": "autosched.runtime.backends.virtual:Virtual",
    "accelerator": "autosched.runtime.backends.accelerator:Accelerator",
    "ranks": "autosched.runtime.ranks.backend:Ranks",
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
    if machine.ranks:
        return "ranks"
    return "accelerator" if machine.accelerators else "threads"
