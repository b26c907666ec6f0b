"""Emulate any machine on this CPU in real time.

Each stream is a thread, and each task and copy takes as many seconds as the costs predict. The
emulator behaves like CUDA where CUDA is easily misused: streams are asynchronous, only events order
them, and freed memory is overwritten with NaN immediately, in the order of the stream that
allocated it.

Schedules that run concurrently on one machine share its streams, as they would on a GPU: each waits
for the work that another has issued on a stream. Machines that are equal are one machine: copies,
and machines read from files, are the same hardware.

Each stream has a modelled clock. A task starts at the latest modelled time of its stream and of the
events that it waited for. It does its real work, and ends after its modelled seconds, or when the
real work ended if that was later. So delays of the operating system in waking a thread do not
accumulate from task to task, as they would not on a device with a hardware queue.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.overrides
from torch.overrides import TorchFunctionMode

from autosched._lib.aliasing import extents
from autosched._lib.code_names import names_in
from autosched._lib.forks import in_child, rlock
from autosched._lib.tree import flatten
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends import Step
from autosched.runtime.backends.host import Host

__all__ = ["Emulated", "Queues"]

_NAP = 0.05  # seconds after which a sleeping stream notices that the run was aborted


class Queues:
    """The time until which each stream of a machine is occupied, by any schedule.

    >>> queues, stream = Queues(), Stream("cuda:0", "compute")
    >>> queues.take([stream], 1.0, 2.0), queues.take([stream], 2.0, 1.0)
    (1.0, 3.0)
    """

    def __init__(self) -> None:
        self._guard = rlock()
        self._until: dict[Stream, float] = {}

    def take(self, streams: Sequence[Stream], start: float, seconds: float) -> float:
        """Occupy streams from ``start``, or from when they are free, and return the start."""
        with self._guard:
            start = max([start, *(self._until.get(stream, start) for stream in streams)])
            self._until.update(dict.fromkeys(streams, start + seconds))
        return start

    def leave(self, streams: Sequence[Stream], end: float) -> None:
        """Free streams, except those that another schedule has occupied since."""
        now = time.perf_counter()
        if now >= end:  # always, unless a run was aborted
            return
        with self._guard:
            for stream in streams:
                if end == self._until.get(stream):
                    self._until[stream] = now

    def clear(self) -> None:
        """Free all streams."""
        self._until.clear()


_queues: weakref.WeakValueDictionary[Machine, Queues] = weakref.WeakValueDictionary()
_opening = rlock()


def _queues_of(machine: Machine) -> Queues:
    """Return the queues of a machine, which live as long as a backend has them."""
    with _opening:
        found = _queues.get(machine)
        if found is None:
            found = _queues[machine] = Queues()
        return found


@in_child
def _free() -> None:
    """Free all streams in a child process, which does not wait for the parent's runs."""
    for queues in list(_queues.values()):
        queues.clear()


class Emulated(Host):
    """See ``autosched.runtime.backends``.

    If real work takes much longer than modelled in several runs, one warning says so. Clocks of
    streams go on from run to run, and a slot has the same ones: a run starts on a stream when it has
    begun and the stream has finished what was issued before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock: dict[Stream, float] = {}
        self.events: dict[int, float] = {}
        self.stopped: Callable[[], bool] = bool
        self.pace = Pace()
        self.queues = Queues()
        self.contention = True
        self.mixing = Mixing()
        self.mixes = False
        # By stream, the seconds that it worked in this run: modelled, and measured.
        self.worked: dict[Stream, tuple[float, float]] = {}

    def open(self, program: Program, machine: Machine) -> None:
        """Create a clock for each stream."""
        self.clock = dict.fromkeys(program.streams, 0.0)
        self.queues = _queues_of(machine)
        self.contention = machine.contention
        self.mixes = bool(machine.accelerators)

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for each stream."""
        return str(stream)

    def here(self, device: str, usual: Any) -> Any:
        """Return the device that replaces ``Here`` on a device: for torch, the CPU."""
        if not isinstance(usual, (str, torch.device)) or torch.device(usual).type != "cpu":
            return usual
        return self.mixing.named(device, torch.device(usual))

    def watched(
        self, device: str, fn: Any, call: Step, arguments: Callable[[], Sequence[Any]]
    ) -> Step:
        """Return the call of a task that raises, as on GPUs, if it mixes devices."""
        return self.mixing.watched(device, fn, call, arguments) if self.mixes else call

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Note the time."""
        super().begin(stopped)
        self.mixing.forget()
        self.stopped = stopped
        self.events = {}
        self.worked = dict.fromkeys(self.clock, (0.0, 0.0))

    def join(self) -> None:
        """Warn if the busiest stream worked much longer than modelled, and in runs before, too."""
        if self.worked and not self.stopped():
            self.pace.judge(*max(self.worked.values()))

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function, then sleep until the modelled end."""
        clock = self.clock
        queues = self.queues
        queueing = [stream for stream in streams if self.contention or _computes(stream)]

        def step() -> None:
            ready = max(self.begun, *(clock[stream] for stream in streams))
            start = queues.take(queueing, ready, seconds)
            try:
                call()
                end = max(start + seconds, time.perf_counter())
                self._sleep_until(end)
            finally:
                queues.leave(queueing, start + seconds)
            for stream in streams:
                clock[stream] = min(end, time.perf_counter())  # earlier, if the run was aborted
                modelled, measured = self.worked[stream]
                self.worked[stream] = modelled + seconds, measured + end - start

        return step

    def record(self, stream: Stream, event: int) -> Step | None:
        """Store the stream's clock."""

        def step() -> None:
            self.events[event] = self.clock[stream]

        return step

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Advance the stream's clock to the event's."""

        def step() -> None:
            # An event that was not recorded is ignored, as by CUDA.
            self.clock[stream] = max(self.clock[stream], self.events.get(event, 0.0))

        return step

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Overwrite the memory, as its next owner would."""
        return _poison

    def _sleep_until(self, end: float) -> None:
        while (left := end - time.perf_counter()) > 0 and not self.stopped():
            time.sleep(min(left, _NAP))


def _computes(stream: Stream) -> bool:
    return stream.name.startswith("compute")


def _poison(value: Any) -> None:
    """Set all bits of tensors, and of nothing else in their storage: NaN in all formats."""
    for leaf in [extent.tensor for extent in extents(value)]:
        if not isinstance(leaf, torch.Tensor):
            continue
        size = leaf.element_size()
        shape = (*leaf.shape, size)
        strides = (*(n * size for n in leaf.stride()), 1)
        raw = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        raw.set_(leaf.untyped_storage(), leaf.storage_offset() * size, shape, strides).fill_(255)


# ---- emulation that falls behind

_LATE = 2.0  # times as long as modelled; less may be due to delays of the operating system
_RUNS = 3  # in a row: the first run is checked, and one may be late by chance


class Pace:
    """Warns once if streams work much longer than modelled in several runs in a row."""

    def __init__(self) -> None:
        self._warned = False
        self._late: list[float] = []

    def judge(self, modelled: float, measured: float) -> None:
        """Note for how long the busiest stream of a run worked."""
        if self._warned or modelled <= 0.0 or measured <= _LATE * modelled:
            self._late.clear()
            return
        self._late.append(measured / modelled)
        if len(self._late) == _RUNS:
            self._warned = True
            message = (
                "this CPU cannot keep up with the emulated machine: the busiest stream in a run is "
                f"predicted to take {modelled * 1e3:.3g} ms and took {measured * 1e3:.3g} ms, so "
                "what is measured says little of the machine; with "
                f"machine.slower({_rounded_up(min(self._late))}), all "
                "ratios stay and it can (costs that are given as seconds, or by default, stay as "
                "they are: examples= estimates them)"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=_users())


def _users() -> int:
    """Return the number of stack frames up to the nearest one outside this package."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("autosched."):
        frame = frame.f_back
        level += 1
    return level


def _rounded_up(factor: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, ...

    >>> _rounded_up(1.5), _rounded_up(61.7), _rounded_up(0.1)
    (2, 100, 1)
    """
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, factor))))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= factor)


# ---- tasks that mix tensors of several emulated devices
#
# All tensors of an emulated machine are in host memory, so torch itself lets them be combined. While
# a task is checked, a torch function mode sees the torch functions that the task calls, and raises
# the errors that a GPU would raise. It changes no result.
#
# * The arguments of a task are on the task's device, and results of torch functions are on the device
#   of the tensors that they were computed from.
# * A tensor created without ``device=`` is on the CPU, and so is the result of ``.cpu()``.
# * ``device=x.device`` and ``device=`` with the placeholder ``asc.Here`` name the device that they
#   name elsewhere. Any other ``device=`` means this computer's CPU, and might mean a GPU on another
#   computer: the device of what is created there, and of parameters and buffers of modules, is
#   unknown, and these are never rejected.
# * A tensor that a function finds in a closure or a global variable is on the CPU.
#
# The exceptions that torch makes are kept: CPU tensors without dimensions can be combined with
# tensors of any device; so can indices and lengths, and ``copy_`` takes tensors of two devices.

CPU = "cpu"

# Functions that take tensors of several devices, or that only read shapes and types.
_FREE = frozenset(
    "__deepcopy__ __getitem__ __reduce_ex__ __setitem__ _ctc_loss _index_put_impl_ "
    "_pack_padded_sequence _pad_packed_sequence _to_copy as_tensor asarray backward "
    "broadcast_tensors can_cast copy_ cpu ctc_loss cuda expand_as grad gru index index_put "
    "index_put_ is_same_size lstm new_tensor reshape_as result_type rnn_relu rnn_tanh set_ tensor "
    "tensor_split to type type_as view_as".split()
)
_FROM_DATA = frozenset(("tensor", "as_tensor", "asarray"))
_MOVING = frozenset(("to", "cpu", "type_as"))


class Mixing:
    """The known devices of the tensors of a run, one run at a time."""

    def __init__(self) -> None:
        # Of tensors by identity: the device, and the line that created it.
        self._known: dict[int, tuple[weakref.ref[Any], str, str]] = {}
        # The emulated devices of objects that are passed to tasks, by identity.
        self._devices: dict[int, tuple[torch.device, str | None]] = {}
        self._named: dict[tuple[str, str], torch.device] = {}

    def forget(self) -> None:
        """Begin a run."""
        self._known.clear()

    def named(self, device: str, real: torch.device) -> torch.device:
        """Return an object equal to ``real`` that ``meant`` recognizes as an emulated device."""
        made = self._named.get((device, str(real)))
        if made is None:
            made = self._named.setdefault((device, str(real)), torch.device(str(real)))
            self._devices[id(made)] = (made, device)
        return made

    def watched(
        self, device: str, fn: Any, call: Step, arguments: Callable[[], Sequence[Any]]
    ) -> Step:
        """Return the call of a task on a device, which raises RuntimeError if it mixes devices."""
        device = CPU if device.partition(":")[0] == CPU else device

        def prepare() -> _Mode:
            for leaf in flatten(list(arguments())):
                if isinstance(leaf, torch.Tensor) and self.of(leaf) is None:
                    self.put(leaf, device)
            return _Mode(self, {id(item): item for item in _captured(fn)})

        return partial(_run, prepare, call)

    def of(self, tensor: torch.Tensor) -> str | None:
        """Return the device of a tensor, None if it is unknown."""
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def put(self, tensor: torch.Tensor, device: str, made: str = "") -> None:
        """Set the device of a tensor."""
        number = id(tensor)
        known = self._known

        def gone(ref: Any) -> None:
            if (found := known.get(number)) is not None and found[0] is ref:
                del known[number]

        known[number] = (weakref.ref(tensor, gone), device, made)

    def source(self, tensor: torch.Tensor) -> str:
        """Return the line that created a tensor, if it is known."""
        found = self._known.get(id(tensor))
        return found[2] if found is not None else ""

    def meant(self, device: Any) -> str | None:
        """Return the emulated device that ``device=`` means, if ``named`` returned it."""
        found = self._devices.get(id(device))
        return None if found is None else found[1]


def _run(prepare: Callable[[], _Mode], call: Step) -> None:
    with _unseen(), prepare():
        call()


_STEP = _run.__code__


class _Mode(TorchFunctionMode):
    """Intercepts the torch functions that one task calls."""

    def __init__(self, mixing: Mixing, outside: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.mixing = mixing
        self.outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            is_emulated = args and self.mixing.meant(args[0]) is not None
            return args[0] if is_emulated else func(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        tensors = [leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        common = self._common(name, tensors)
        result = func(*args, **kwargs)
        if type(result) is torch.device:
            device = self._of(args[0]) if args else None
            return result if device is None else self.mixing.named(device, result)
        if isinstance(result, (torch.Tensor, tuple, list)):
            target = self._target(name, args, kwargs, tensors, common)
            return self._placed(result, name, args, kwargs, target)
        return result

    def _of(self, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        found = self.mixing.of(tensor)
        return CPU if found is None and self.outside.get(id(tensor)) is tensor else found

    def _common(self, name: str, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the tensors' device, None if unknown. Raises RuntimeError if there are several."""
        on: dict[str, torch.Tensor] = {}
        unknown = False
        for number, tensor in enumerate(tensors):
            device = self._of(tensor)
            written = number == 0 and name.endswith("_") and not name.endswith("__")
            if device is None:
                unknown = True
            elif device != CPU or written or tensor.dim():
                on.setdefault(device, tensor)
        if len(on) > 1 and name not in _FREE and not name.startswith("_foreach"):
            raise RuntimeError(self._complaint(name, on))
        if on:
            return next(iter(on)) if len(on) == 1 else self._of(tensors[0])
        return None if unknown else CPU

    def _target(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Any],
        common: str | None,
    ) -> str | None:
        """Return the device of a result, None if it is unknown."""
        named = kwargs.get("device")
        if name in ("to", "type_as") and named is None:
            other = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(other, torch.Tensor):
                return self._of(other)
            named = other if isinstance(other, (str, torch.device)) else None
        if named is not None:
            return self.mixing.meant(named)
        if name == "cpu" or (name in _FROM_DATA and args and not isinstance(args[0], torch.Tensor)):
            return CPU
        if name in _FREE and tensors:
            return self._of(tensors[0])
        return common

    def _placed(
        self, result: Any, name: str, args: Sequence[Any], kwargs: Any, device: str | None
    ) -> Any:
        """Set the device of a result. What a GPU would have copied becomes a separate tensor."""
        given = {id(leaf) for leaf in flatten((args, kwargs))}
        if name in _MOVING and id(result) in given:
            if device == self._of(result):
                return result
            result = torch.ops.aten.alias.default(result)
        made = _line() if device == CPU else ""
        for leaf in flatten(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given and device is not None:
                self.mixing.put(leaf, device, made)
        return result

    def _complaint(self, name: str, on: Mapping[str, torch.Tensor]) -> str:
        first, second = sorted(on, key=CPU.__eq__)[:2]
        text = (
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}! ({name}{_line()}, emulated as on a GPU)"
        )
        tensor = on[second]
        if id(tensor) in self.outside:
            return f"{text}; the tensor on {second} is none of the task's arguments: make it one"
        if source := self.mixing.source(tensor):
            text += f"; the tensor on {second} was made{source}"
        return f"{text}; make it with device= of another argument's .device, or of asc.Here"


def _captured(fn: Any) -> Iterator[torch.Tensor]:
    """Yield tensors in a function's closures, defaults and globals, except those of modules."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    found = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    found += [fn.__globals__.get(name) for name in names_in(code).globals]
    yield from (item for item in found if type(item) is torch.Tensor)


def _line() -> str:
    """Return the current line of the task's own code; nothing if the task is an operator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _STEP:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("autosched", "torch", "contextlib"):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Attention modules take their fast path only if ``torch.overrides.has_torch_function`` sees no
# mode, and its results differ in the last bits. So that function must not see this module's mode.
_hiding = threading.Lock()
_hidden: list[Any] = []
_original = torch.overrides.has_torch_function


def _has_torch_function(args: Iterable[Any]) -> bool:
    current: Any = torch.overrides._get_current_function_mode
    if isinstance(current(), _Mode):
        with torch.overrides._pop_mode_temporarily():
            return bool(_original(args))
    return bool(_original(args))


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    token = object()
    try:
        with _hiding:
            _hidden.append(token)
            torch.overrides.has_torch_function = _has_torch_function
        yield
    finally:
        with _hiding:
            _hidden.remove(token)
            if not _hidden:
                torch.overrides.has_torch_function = _original
