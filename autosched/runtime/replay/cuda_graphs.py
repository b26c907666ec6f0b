"""Capture an accelerator's work as CUDA graphs and replay them.

The rules of CUDA graphs that this module follows:

1. There is at most one capture at a time in a process. Work of other threads during a capture is
   not restricted (mode "thread_local"), except that they must not synchronize the whole device:
   that ends the capture, and the run is recorded again later. The device is synchronized before
   each capture, because torch initialises the random number state of a capture in memory that
   replays read.
2. Work is captured on dedicated streams from a separate pool (of high priority, so that no other
   torch stream is one of them; one that torch hands out again is skipped). Segments fork from their
   stream and join it through captured events (``segments``).
3. A thread creates its handles of cuBLAS and cuDNN at their first use, which allocates, and must
   not happen in a capture. So the thread that records creates them before. Two graphs that were
   captured on one stream share a cuBLAS workspace, and work that is not captured may use it at the
   same time. So workspaces are released before and after a capture: each graph has its own
   workspace, in its memory pool, and the workspace is freed as other memory of that stream is.
   torch can release only all workspaces of the process, also those of graphs that others captured.
4. Memory of a graph comes from a private pool of one device; each segment is on one device. The
   pool is shared by all segments of a recording, and by the copies between them. That is safe,
   because they are replayed in the order of capture on each stream: a block is allocated after it
   was freed by its previous user. Between replays the caller's streams order the accesses. A first,
   small graph keeps the pool alive. While a graph is captured, torch does not release cached memory
   to make room. So that is done before the first capture of a recording, and a run that does not
   fit while it is recorded is an ordinary one.
5. A graph is replayed on the current stream, after all work there. Random numbers continue from the
   current state of the generator. torch registers default generators; other generators that tasks
   were given are registered here.
6. A capture that fails leaves no trace: it is ended, its pool is released, and the generators that
   it used are reset by a capture that does not fail. torch before 2.13 asks graphs that have failed
   about each later allocation of page-locked memory in a capture, so these are kept.
"""

from __future__ import annotations

import contextlib
import copy as copying
import threading
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from autosched._lib.gc_pause import without_collecting
from autosched.machine.machine import Machine
from autosched.program.program import Program, Record, Stream
from autosched.runtime.backends import Step
from autosched.runtime.backends.accelerator import Accelerator, pooled

_CAPTURING = threading.RLock()
_with_handles = threading.local()  # the devices for which a thread has handles of libraries
_failed: list[torch.cuda.CUDAGraph] = []
# cudaErrorStreamCaptureInvalidated, as torch reports it.
_INVALIDATED = "operation failed due to a previous error during capture"


class Replay(Accelerator):
    """See ``autosched.runtime.backends``: can record what steps issue to devices, and replay it."""

    def __init__(self) -> None:
        super().__init__()
        self.on: dict[int, torch.device] = {}  # where events are recorded
        self.recorders: list[_Recorder] = []
        self.last: dict[torch.device, torch.Event] = {}

    def open(self, program: Program, machine: Machine) -> None:
        """Take streams from the pool and create events. Raises MachineError for missing devices."""
        super().open(program, machine)
        records = [i for i in program if isinstance(i, Record) and i.stream in self.streams]
        self.on = {record.event: self.devices[record.stream.device] for record in records}

    def refusal(self) -> str | None:
        """Return the reason why nothing can be recorded here, if there is one."""
        kinds = dict.fromkeys(stream.device.type for stream in self.streams.values())
        if not kinds:
            return "nothing of it runs on an accelerator"
        others = [kind for kind in kinds if kind != "cuda"]
        if others:
            return f"of {others[0]!r} torch has no graphs that replay, as CUDA has"
        if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            return (
                "this build of torch keeps the workspaces of cuBLAS for good, "
                "and graphs would share them"
            )
        return None

    def may_pass(self, error: Exception) -> bool:
        """Whether a recording failed as memory was short, or as another thread interfered."""
        return isinstance(error, torch.OutOfMemoryError) or _INVALIDATED in str(error)

    def recorder(self) -> _Recorder:
        """Return the memory of a new recording."""
        self.recorders.append(_Recorder(self))
        return self.recorders[-1]

    def alone(self, recording: bool) -> Accelerator:
        """Return this backend as if the calling thread issued everything.

        For recording, on separate streams.
        """
        twin = copying.copy(self)
        twin.own_thread = set()
        if recording:
            own = self.streams.items()
            twin.streams = {name: stream_to_record(stream.device, name) for name, stream in own}
            twin.events = {event: torch.Event(device) for event, device in self.on.items()}
        return twin

    def stays(self, leaf: Any, device: str) -> str | None:
        """Return a description of a leaf that a replay would not compute again on a device."""
        if not isinstance(leaf, torch.Tensor):
            return f"{leaf!r}, of type {type(leaf).__name__},"
        if leaf.device != self.devices[device]:
            return f"a tensor on {leaf.device}"
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
            kinds = "sparse, quantized, or conjugated when it is read"
            return f"a tensor that is more than its numbers: {kinds}"
        return "a tensor with a history for autograd" if leaf.grad_fn is not None else None

    def wrote(self, tensor: Any) -> None:
        """Increment the version of a tensor of the caller's that a replay wrote."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def settle(self) -> None:
        """Make the caller's streams wait for the end of the last replay, by whichever caller."""
        for device, event in self.last.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def settled(self) -> None:
        """Note that the caller's streams have received the results of a replay."""
        for device, caller in self.callers.items():
            self.last.setdefault(device, torch.Event(device)).record(caller)

    def close(self) -> None:
        """Release recordings, too."""
        for recorder in [*self.recorders]:
            recorder.close()
        super().close()


class _Recorder:
    """The memory of a recording, and the methods that record into it."""

    def __init__(self, backend: Replay):
        self.backend = backend
        self.pools: dict[torch.device, Any] = {}
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, stream: Stream, steps: Step, used: Iterable[Any]) -> Step:
        """Capture the work that steps issue to devices, which does not happen; return its replay.

        ``used`` may hold generators of random numbers. Raises what the steps raise, and an error if
        the work cannot be recorded; then no trace of it remains.
        """
        device = self.backend.devices[stream.device]
        _create_handles(device)
        pool = self._pool(device)
        with _CAPTURING, without_collecting():
            self.graphs.append(_captured(stream_to_record(device, stream), pool, steps, used))
        return self.graphs[-1].replay

    def _pool(self, device: torch.device) -> Any:
        """Return the handle of a device's pool, which a small graph keeps alive."""
        if device not in self.pools:
            pool = torch.cuda.graph_pool_handle()
            small = partial(torch.zeros, 1, device=device)
            with _CAPTURING, without_collecting():
                torch.cuda.empty_cache()
                self.graphs.append(_captured(_stream_for_pools(device), pool, small, ()))
            self.pools[device] = pool
        return self.pools[device]

    @contextlib.contextmanager
    def allocating(self, device: str) -> Iterator[None]:
        """Allocate from the pool of a device."""
        real = self.backend.devices[device]
        pool: Any = SimpleNamespace(id=self._pool(real))
        with torch.cuda.use_mem_pool(pool, real):
            yield

    def borrowed(self, tensor: Any) -> Any:
        """Return a tensor on the same memory that does not prevent its reuse."""
        is_ours = isinstance(tensor, torch.Tensor) and tensor.device in self.pools
        return _borrowed(tensor) if is_ours else tensor

    def close(self) -> None:
        """Release graphs and pools, when devices are idle."""
        if self in self.backend.recorders:
            self.backend.recorders.remove(self)
        # At the interpreter's exit there may be no device any more.
        with contextlib.suppress(Exception), _CAPTURING:
            for device in self.pools:
                torch.accelerator.synchronize(device)
            for graph in self.graphs:
                graph.reset()
        self.graphs.clear()
        self.pools.clear()


def stream_to_record(device: torch.device, name: Stream) -> torch.Stream:
    """Return the stream on which work of a stream is captured.

    Raises MachineError if torch has no other stream.
    """
    return pooled(device, name, priority=-1)


def _stream_for_pools(device: torch.device) -> torch.Stream:
    return stream_to_record(device, Stream("", "pool"))


def _create_handles(device: torch.device) -> None:
    """Create this thread's handles of cuBLAS and cuDNN, unless it has them."""
    devices = vars(_with_handles).setdefault("devices", set())
    if device in devices:
        return
    with torch.cuda.device(device), torch.no_grad():
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        one = torch.ones(1, 1, 1, 1, device=device)
        torch.nn.functional.conv2d(one, one)  # torch has no function for the handle of cuDNN
    devices.add(device)


def _captured(
    root: torch.Stream, pool: Any, steps: Step, used: Iterable[Any]
) -> torch.cuda.CUDAGraph:
    """Return the work that steps issue to devices, as a graph. Leaves no trace if it fails."""
    torch.accelerator.synchronize(root.device)
    generators = [
        item for item in used if isinstance(item, torch.Generator) and item.device.type == "cuda"
    ]
    with contextlib.ExitStack() as after:
        after.enter_context(_current(root))
        torch._C._cuda_clearCublasWorkspaces()
        after.callback(torch._C._cuda_clearCublasWorkspaces)
        after.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph = _begun(pool, generators)
        try:
            steps()
            torch.accelerator.set_stream(root)
            graph.capture_end()
        except BaseException:
            torch.accelerator.set_stream(root)
            with contextlib.suppress(Exception):
                _abandon(graph, root.device, pool, generators)
            raise
    return graph


def _begun(pool: Any, generators: Iterable[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Begin a capture on the current stream.

    Generators are registered on the current device, where torch keeps their state for graphs.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    return graph


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current.

    A ``with`` statement would remember the stream to go back to on the shared stream object.
    """
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def _abandon(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, used: Iterable[torch.Generator]
) -> None:
    """End a capture that has failed, and restore what torch had set up for it."""
    try:
        graph.capture_end()
    except Exception:
        _failed.append(graph)
        # torch before 2.13 leaves this to a capture that succeeds.
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with _current(_stream_for_pools(device)):
            _begun(torch.cuda.graph_pool_handle(), used).capture_end()
    graph.reset()


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on memory that it does not own."""
    storage = tensor.untyped_storage()
    if not storage.data_ptr():
        return tensor
    lent = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(lent, tensor.storage_offset(), tensor.shape, tensor.stride())
