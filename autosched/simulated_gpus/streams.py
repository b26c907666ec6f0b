"""What torch calls streams, events, graphs and generators, on simulated GPUs."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from autosched.simulated_gpus.generators import Generator, State
from autosched.simulated_gpus.hardware import device as gpu
from autosched.simulated_gpus.hardware import hardware
from autosched.simulated_gpus.queues import Capture, Mark, Queue

# The pools of graphs that are given none; a failed capture keeps its pool for good.
_POOLS = itertools.count(1)

Device = Any  # what torch takes for one: a device, its name or number, or None for the current one


def index(device: Device) -> int:
    """Return the number of a device. Raises RuntimeError for what is not simulated."""
    if device is None:
        return hardware().device
    found = gpu(device) if isinstance(device, int) else torch.device(device)
    number = hardware().device if found.index is None else found.index
    if found.type != hardware().kind or not 0 <= number < hardware().gpus:
        raise RuntimeError(f"{device} is no simulated GPU")
    return number


class Stream:
    """Stands for ``torch.Stream`` and ``torch.cuda.Stream``.

    The object, and not the ``with`` statement, knows the stream to go back to.
    """

    def __init__(self, device: Device = None, priority: int = 0, *, queue: Queue | None = None):
        self.of_pool = queue is None
        self.queue = hardware().from_pool(index(device), priority) if queue is None else queue
        self.device_index, self.stream_id, self.device_type = (
            self.queue.device,
            self.queue.number,
            1,
        )
        self.device = gpu(self.queue.device)
        self.priority = priority
        self.cuda_stream = self.native_handle = 64 * self.queue.device + self.queue.number
        self._outer: tuple[int, Queue] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<simulated stream {self.queue}>"

    def wait_event(self, event: Event) -> None:
        hardware().wait(self.queue, event.mark, event)

    def wait_stream(self, other: Stream) -> None:
        hardware().wait(self.queue, hardware().record(other.queue))

    def record_event(self, event: Event | None = None) -> Event:
        made = Event(self.device) if event is None else event
        made.record(self)
        return made

    def synchronize(self) -> None:
        hardware().synchronize(self.queue, asked=True)

    def is_capturing(self) -> bool:
        return self.queue.capture is not None

    def query(self) -> bool:
        hardware().forbid("a stream is queried", self.queue)
        return hardware().poll(hardware().record(self.queue))

    def __enter__(self) -> Stream:
        gpus = hardware()
        self._outer = gpus.device, gpus.current[self.device_index]
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            hardware().device, hardware().current[self.device_index] = self._outer
        self._outer = None


class Event:
    """Stands for ``torch.Event``: a record makes a new mark, and earlier waits keep theirs."""

    def __init__(self, device: Device = None, *, enable_timing: bool = False, **_: bool):
        index(device)
        self.enable_timing, self.mark = enable_timing, None

    mark: Mark | None

    @property
    def device(self) -> torch.device:
        return gpu(-1 if self.mark is None else self.mark.queue.device)

    def record(self, stream: Stream | None = None) -> None:
        queue = hardware().current[hardware().device] if stream is None else stream.queue
        if self.mark is not None and self.mark.queue.device != queue.device:
            raise RuntimeError(
                f"Event device index {self.mark.queue.device} does not match that of {stream}"
            )
        self.mark = hardware().record(queue)

    def wait(self, stream: Stream | None = None) -> None:
        queue = hardware().current[hardware().device] if stream is None else stream.queue
        hardware().wait(queue, self.mark, self)

    def query(self) -> bool:
        self._check("queried")
        return hardware().poll(self.mark)

    def synchronize(self) -> None:
        self._check("synchronized")
        hardware().until([self.mark], asked=True)

    def _check(self, what: str) -> None:
        hardware().forbid(f"an event is {what}")
        if self.mark is not None and self.mark.capture is not None:
            raise RuntimeError(
                "CUDA error: operation not permitted on an event last recorded in a capturing stream"
            )

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds between two events that have happened on one device."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or end.mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.mark.past and end.mark.past):
            raise ValueError("Both events must be completed before calculating elapsed time.")
        if self.mark.queue.device != end.mark.queue.device:
            raise ValueError("Both events must be on the same device to calculate elapsed time.")
        return (end.mark.seconds - self.mark.seconds) * 1e3


class CudaEvent(Event):
    """Stands for ``torch.cuda.Event``, which is told no device."""

    def __init__(self, enable_timing: bool = False, *_: bool, **__: bool):
        super().__init__(None, enable_timing=enable_timing)


# ---- what is current


def current_stream(device: Device = None) -> Stream:
    return Stream(queue=hardware().current[index(device)])


def default_stream(device: Device = None) -> Stream:
    return Stream(queue=hardware().default[index(device)])


def set_stream(stream: Stream | None) -> None:
    """Make a stream current, and its device."""
    if stream is not None:
        hardware().device = stream.device_index
        hardware().current[stream.device_index] = stream.queue
        hardware().observer.entered(stream)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Stands for ``torch.cuda.stream``."""
    if stream is None:
        yield
        return
    gpus = hardware()
    outer = gpus.device, gpus.current[stream.device_index]
    set_stream(stream)
    try:
        yield
    finally:
        gpus.device, gpus.current[stream.device_index] = outer


def set_device(device: Device) -> None:
    hardware().device = index(device)


class device:  # noqa: N801
    """Stands for ``torch.cuda.device`` and ``torch.accelerator.device_index``."""

    def __init__(self, device: Device):
        self.index = index(device)

    def __enter__(self) -> None:
        self.outer, hardware().device = hardware().device, self.index

    def __exit__(self, *_: object) -> None:
        hardware().device = self.outer


class device_of(device):  # noqa: N801
    """Stands for ``torch.cuda.device_of``."""

    def __init__(self, obj: torch.Tensor):
        super().__init__(obj.get_device() if obj.is_cuda else None)


def synchronize(device: Device = None) -> None:
    hardware().synchronize_device(index(device))


def sleep(cycles: int) -> None:
    """Stands for ``torch.cuda._sleep``: what does not have to wait comes first."""
    gpus = hardware()
    gpus.put(gpus.current[gpus.device], "sleep", lambda: None, cycles=max(1, cycles))


# ---- memory


def memory_allocated(device: Device = None) -> int:
    return hardware().allocators[index(device)].allocated


def memory_reserved(device: Device = None) -> int:
    return hardware().allocators[index(device)].reserved


def max_memory_allocated(device: Device = None) -> int:
    return hardware().allocators[index(device)].peak


def reset_peak_memory_stats(device: Device = None) -> None:
    allocator = hardware().allocators[index(device)]
    allocator.peak = allocator.allocated


def memory_stats(device: Device = None) -> dict[str, int]:
    allocator = hardware().allocators[index(device)]
    return {
        "allocated_bytes.all.current": allocator.allocated,
        "allocated_bytes.all.peak": allocator.peak,
        "reserved_bytes.all.current": allocator.reserved,
    }


def mem_get_info(device: Device = None) -> tuple[int, int]:
    total = int(min(hardware().nbytes, 2**40))
    return total - hardware().allocators[index(device)].reserved, total


def empty_cache() -> None:
    hardware().empty_cache()


def begin_allocating(device: int, pool: Any) -> None:
    """Stands for ``torch._C._cuda_beginAllocateCurrentThreadToPool``."""
    me = threading.get_ident()
    hardware().allocators[device].begin(tuple(pool), lambda _: threading.get_ident() == me)


def end_allocating(device: int, pool: Any) -> None:
    """Stands for ``torch._C._cuda_endAllocateToPool``."""
    hardware().allocators[device].end(tuple(pool))


def release_pool(device: int, pool: Any) -> None:
    """Stands for ``torch._C._cuda_releasePool``."""
    hardware().allocators[device].release(tuple(pool))


# ---- libraries


def current_blas_handle() -> int:
    """Return the handle of this thread and device, which has a workspace for the current stream."""
    gpus = hardware()
    if gpus.libraries is None:
        return 1
    gpus.libraries.workspace(gpus.current[gpus.device])
    return int(gpus.libraries.handle("cublas", gpus.device))


def release_workspaces() -> None:
    """Stands for ``torch._C._cuda_clearCublasWorkspaces``."""
    if hardware().libraries:
        hardware().libraries.release_workspaces()


# ---- random numbers


def default_generator(device: int) -> Generator:
    return Generator(hardware().generators[device], hardware().known_generators)


def new_generator(device: Device) -> Generator:
    """Stands for ``torch.Generator``."""
    return Generator(State(index(device), hardware().kind), hardware().known_generators)


def manual_seed(seed: int) -> None:
    default_generator(hardware().device).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for device in range(hardware().gpus):
        default_generator(device).manual_seed(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    return default_generator(index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    default_generator(index(device)).set_state(state)


# ---- graphs


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``. ``nodes`` are what was captured, each with those it comes behind.

    As in torch 2.11, an end that fails leaves the allocators, the count of the pool's users and the
    generators as they are during a capture.
    """

    def __init__(self, keep_graph: bool = False):
        self.captured: Capture | None = None
        self.last: Mark | None = None
        self._gpus = hardware()
        self._device = self._gpus.device
        self._pool: Any = None
        self._holds_pool = False
        self._generators: dict[State, None] = {}

    @property
    def nodes(self) -> list[Any]:
        return [] if self.captured is None else self.captured.nodes

    def register_generator_state(self, generator: Generator) -> None:
        self._register(generator.state)

    def _register(self, state: State) -> None:
        state.register(self, self._gpus.device)
        self._generators[state] = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpus, self._device = self._gpus, self._gpus.device
        queue = gpus.current[self._device]
        if queue.number == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = (next(_POOLS), 0) if pool is None else tuple(pool)
        self._register(gpus.generators[self._device])
        for state in self._generators:
            state.capturing = True
            place, seed = state.place, state.seed
            gpus.put(queue, "begin to draw", partial(place.fill, seed, 0))
        captured: Capture | None = None
        gpus.allocators[self._device].begin(
            self._pool, lambda queue: captured is not None and queue.capture is captured
        )
        if self._pool in gpus.pinned_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        gpus.pinned_underway[self._pool] = weakref.ref(self)
        captured = gpus.begin_capture(capture_error_mode)
        captured.drawn = dict.fromkeys(self._generators, 0)

    def capture_end(self) -> None:
        self.captured = self._gpus.end_capture()
        self._holds_pool = True
        self._gpus.allocators[self._device].end(self._pool)
        del self._gpus.pinned_underway[self._pool]
        for state in self._generators:
            state.capturing = False

    def replay(self) -> None:
        gpus = self._gpus
        if self.captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        queue = gpus.current[gpus.device]
        for state, count in self.captured.drawn.items():
            if count:
                place, now = state.place, (state.seed, state.drawn)
                gpus.put(queue, "begin to draw", partial(place.fill, *now))
                state.drawn += count
        self.last = gpus.replay(self.captured, queue, self.last)

    def reset(self) -> None:
        self.captured = None
        if self._holds_pool:
            self._holds_pool = False
            self._gpus.allocators[self._device].release(self._pool)

    def __del__(self) -> None:
        for state in self._generators:
            state.graphs.discard(self)
        self.reset()

    def pool(self) -> Any:
        return self._pool

    def instantiate(self) -> None:
        """Need nothing."""


class graph:  # noqa: N801
    """Stands for ``torch.cuda.graph``."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        **_: Any,
    ):
        self.graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode
        gpus = hardware()
        if stream is None and gpus.capture_queue is None:  # one for all graphs, as torch has it
            gpus.capture_queue = Stream().queue
        self.stream = Stream(queue=gpus.capture_queue) if stream is None else stream

    def __enter__(self) -> None:
        hardware().synchronize_device(hardware().device, asked=False)
        empty_cache()
        self.current = stream(self.stream)
        self.current.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *error: object) -> None:
        try:
            self.graph.capture_end()
        finally:
            self.current.__exit__(None, None, None)


_handles = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_handles)


@contextlib.contextmanager
def use_mem_pool(pool: Any, device: Device = None) -> Iterator[None]:
    """Stands for ``torch.cuda.use_mem_pool``: what is allocated by this thread is of a pool of graphs."""
    begin_allocating(index(device), pool.id)
    try:
        yield
    finally:
        end_allocating(index(device), pool.id)
        release_pool(index(device), pool.id)


def is_current_stream_capturing() -> bool:
    return hardware().current[hardware().device].capture is not None
