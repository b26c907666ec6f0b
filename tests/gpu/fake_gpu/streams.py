"""What torch calls streams, events, graphs and generators, on played GPUs."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.fake_gpu.hardware import hardware
from tests.gpu.fake_gpu.queues import Capture, Mark, Queue

Device = Any  # what torch takes for one: a device, its name or number, or None for the current one


def index(device: Device) -> int:
    """Return the number of a device. Raises RuntimeError for what is not played."""
    if device is None:
        return hardware().device
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    number = hardware().device if found.index is None else found.index
    if found.type != "cuda" or not 0 <= number < hardware().gpus:
        raise RuntimeError(f"{device} is no played GPU")
    return number


class Stream:
    """Stands for ``torch.Stream`` and ``torch.cuda.Stream``."""

    def __init__(self, device: Device = None, priority: int = 0, *, queue: Queue | None = None):
        self.queue = hardware().from_pool(index(device), priority) if queue is None else queue
        self.device_index, self.stream_id, self.device_type = (
            self.queue.device,
            self.queue.number,
            1,
        )
        self.device = torch.device("cuda", self.queue.device)
        self.priority = priority
        self.cuda_stream = self.native_handle = 64 * self.queue.device + self.queue.number
        self._outer: list[tuple[int, Queue]] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<played stream {self.queue}>"

    def wait_event(self, event: Event) -> None:
        hardware().wait(self.queue, event.mark)

    def wait_stream(self, other: Stream) -> None:
        hardware().wait(self.queue, hardware().record(other.queue))

    def record_event(self, event: Event | None = None) -> Event:
        made = Event(self.device) if event is None else event
        made.record(self)
        return made

    def synchronize(self) -> None:
        hardware().synchronize(self.queue)

    def query(self) -> bool:
        hardware().forbid("a stream is queried", self.queue)
        return hardware().poll(hardware().record(self.queue))

    def __enter__(self) -> Stream:
        gpus = hardware()
        self._outer.append((gpus.device, gpus.current[self.device_index]))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        hardware().device, hardware().current[self.device_index] = self._outer.pop()


class Event:
    """Stands for ``torch.Event``: a record makes a new mark, and earlier waits keep theirs."""

    def __init__(
        self,
        device: Device = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ):
        index(device)
        self.enable_timing, self.mark = enable_timing, None

    mark: Mark | None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", -1 if self.mark is None else self.mark.queue.device)

    def record(self, stream: Stream | None = None) -> None:
        queue = hardware().current[hardware().device] if stream is None else stream.queue
        if self.mark is not None and self.mark.queue.device != queue.device:
            raise RuntimeError(
                f"Event device index {self.mark.queue.device} does not match that of {stream}"
            )
        self.mark = hardware().record(queue)

    def wait(self, stream: Stream | None = None) -> None:
        hardware().wait(
            hardware().current[hardware().device] if stream is None else stream.queue, self.mark
        )

    def query(self) -> bool:
        self._check("queried")
        return hardware().poll(self.mark)

    def synchronize(self) -> None:
        self._check("synchronized")
        hardware().until([self.mark])

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

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ):
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


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Stands for ``torch.cuda.stream``."""
    with stream or contextlib.nullcontext():
        yield


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


def synchronize(device: Device = None) -> None:
    hardware().synchronize_device(index(device))


def sleep(cycles: int) -> None:
    """Stands for ``torch.cuda._sleep``: what does not have to wait comes first."""
    gpus = hardware()
    gpus.put(gpus.current[gpus.device], "sleep", lambda _: None, sleeps=True)


# ---- memory


def memory_allocated(device: Device = None) -> int:
    return hardware().allocated[index(device)]


def max_memory_allocated(device: Device = None) -> int:
    return hardware().peak[index(device)]


def reset_peak_memory_stats(device: Device = None) -> None:
    gpus = hardware()
    gpus.peak[index(device)] = gpus.allocated[index(device)]


def memory_stats(device: Device = None) -> dict[str, int]:
    at = index(device)
    return {
        "allocated_bytes.all.current": hardware().allocated[at],
        "allocated_bytes.all.peak": hardware().peak[at],
    }


def mem_get_info(device: Device = None) -> tuple[int, int]:
    total = int(min(hardware().nbytes, 2**40))
    return total - hardware().allocated[index(device)], total


def empty_cache() -> None:
    hardware().forbid("memory goes back")


# ---- random numbers


class Generator:
    """Stands for the default generator of a GPU."""

    def __init__(self, device: int):
        self.index, self.device = device, torch.device("cuda", device)

    def manual_seed(self, seed: int) -> Generator:
        hardware().seeds[self.index], hardware().drawn[self.index] = seed, 0
        return self

    def initial_seed(self) -> int:
        return hardware().seeds[self.index]

    def get_state(self) -> torch.Tensor:
        state = torch.tensor([hardware().seeds[self.index], hardware().drawn[self.index]])
        return state.view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        hardware().seeds[self.index], hardware().drawn[self.index] = state.view(
            torch.int64
        ).tolist()


def manual_seed(seed: int) -> None:
    Generator(hardware().device).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for device in range(hardware().gpus):
        Generator(device).manual_seed(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    return Generator(index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    Generator(index(device)).set_state(state)


# ---- graphs


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``. ``nodes`` are what was captured, each with those it comes behind."""

    def __init__(self, keep_graph: bool = False):
        self.captured: Capture | None = None
        self.last: Mark | None = None
        self._pool: Any = None

    @property
    def nodes(self) -> list[Any]:
        return [] if self.captured is None else self.captured.nodes

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._pool = (id(self), 0) if pool is None else pool
        hardware().begin_capture(capture_error_mode)

    def capture_end(self) -> None:
        self.captured = hardware().end_capture()

    def replay(self) -> None:
        gpus = hardware()
        if self.captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        queue = gpus.current[gpus.device]
        device = self.captured.origin.device
        base = gpus.drawn[device]
        gpus.drawn[device] += self.captured.drawn
        self.last = gpus.replay(self.captured, queue, base, self.last)

    def reset(self) -> None:
        self.captured = None

    def pool(self) -> Any:
        return self._pool

    def instantiate(self) -> None:
        """Need nothing."""

    def enable_debug_mode(self) -> None:
        """Need nothing."""

    def register_generator_state(self, generator: Any) -> None:
        """Need nothing: default generators are registered by themselves."""


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
        self.stream = Stream() if stream is None else stream

    def __enter__(self) -> None:
        synchronize()
        self.stream.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *error: object) -> None:
        try:
            self.graph.capture_end()
        finally:
            self.stream.__exit__(*error)


_handles = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_handles)


@contextlib.contextmanager
def use_mem_pool(pool: Any, device: Device = None) -> Iterator[None]:
    """Stands for ``torch.cuda.use_mem_pool``: what is allocated by this thread is of a pool of graphs."""
    gpus = hardware()
    assert pool.id is not None, index(device)
    gpus.pooled.add(threading.get_ident())
    try:
        yield
    finally:
        gpus.pooled.discard(threading.get_ident())


def is_current_stream_capturing() -> bool:
    return hardware().current[hardware().device].capture is not None
