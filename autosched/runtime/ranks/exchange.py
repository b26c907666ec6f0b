"""Copies between ranks, as works that are started and that events stand for.

A copy stream is asynchronous, as on an accelerator: its copies are started by the thread that issues
it, and end later. An event stands for the copies that its stream has started so far; who waits for
it waits for those. No thread waits for a copy that nobody needs yet.

Each copy has a number, which is its tag; NCCL has no tags, and both ranks start its copies in the
order of the program. In the first run a description goes ahead of each value; ahead of plain data,
such as numbers, in each run. From then on both sides know what comes: the receiver is ready from the
beginning of a run, in memory that it keeps, and the sender compares before it sends, because gloo
aborts a receiver that gets more than it expects.

Where connections close, gloo never wakes who waits for a copy of which a part is under way. So
threads that still wait a moment later are given up, and the run ends without them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from autosched._lib.aliasing import overlaps_itself
from autosched._lib.copying import ALIGNMENT, span, storage_at
from autosched._lib.holders import holders
from autosched._lib.process_group import LIMIT, ProcessGroup
from autosched._lib.tree import flatten, transform
from autosched.errors import AutoschedError, ScheduleError, shown
from autosched.program.program import Program, Receive, Record, Send, Stream, Wait
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.host import overwritten

_PATIENCE = 0.2  # seconds for waits to end when connections are lost
_LONGEST = 1 << 16  # bytes of a description: its receiver does not know how long it is


class Exchange:
    """The sends and receives of one rank's part of a program.

    ``ranks`` are the ranks of devices by name, and ``threads`` the names of the threads that issue
    streams. ``direct`` are the devices whose copies go over NCCL, and ``onward`` the versions of values
    that go on to one. ``begin`` is called at the beginning of each run, and the steps of ``transfer``
    and ``wait`` where the program has them.
    """

    def __init__(
        self,
        part: Program,
        ranks: Mapping[str, int],
        threads: Mapping[Stream, str | None],
        group: ProcessGroup,
        direct: Mapping[str, torch.device],
        onward: Collection[tuple[str, int]],
    ):
        self.group = group
        # Called with a thread whose wait never ends, with its position and with the cause.
        self.give_up: Callable[[int, int, AutoschedError], None] = lambda *_: None
        self.waiting: dict[int, _End] = {}  # by thread
        self._ends: dict[Send | Receive, deque[_Send | _Receive]] = defaultdict(deque)
        self._by_stream: dict[Stream, list[_End]] = {}
        self._receives: list[_Receive] = []
        self._sent: dict[int, list[_End]] = {}  # by the identity of a value
        self._awaited: dict[tuple[Stream, int], list[_End]] = {}
        self._recorded = recorded = dict[int, list[_End]]()
        waited: Counter[tuple[str | None, Stream]] = Counter()  # how many, by thread
        # Of each pair of ranks, sends and receives are the same sequence: so both know the tags.
        count: Counter[tuple[int, bool]] = Counter()
        for i, item in enumerate(part):
            match item:
                case Record(stream, event) if stream in self._by_stream:
                    recorded[event] = [*self._by_stream[stream]]
                case Wait(stream, event) if event in recorded:
                    at = threads[stream], recorded[event][0].stream
                    self._awaited.setdefault((stream, event), recorded[event][waited[at] :])
                    waited[at] = max(waited[at], len(recorded[event]))
            if not isinstance(item, (Send, Receive)):
                continue
            here = item.stream.device
            peer = ranks[item.destination if isinstance(item, Send) else item.source]
            key = peer, isinstance(item, Send)
            where = f"instruction {i + 1} of {len(part)}"
            kind = _Send if isinstance(item, Send) else _Receive
            made = kind(self, group, item, i, peer, count[key], direct.get(here), where)
            count[key] += 1
            self._ends[item].append(made)
            if here not in direct:
                self._by_stream.setdefault(item.stream, []).append(made)
            if isinstance(made, _Receive) and here not in direct:
                made.is_pinned = (item.value, item.version) in onward
                self._receives.append(made)
        group.users.add(self)

    # ---- compiling

    def transfer(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive; call once for each, in order."""
        return self._ends[half].popleft()

    def is_copied(self, event: int) -> bool:
        """Whether an event stands for copies between ranks."""
        return event in self._recorded

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Return a step that waits for the copies of an event, unless its thread has done so."""
        return _waiting(self._awaited.get((stream, event), ()))

    def sent(self, value: Any, end: _End) -> None:
        """Note a send that keeps the memory of a value."""
        self._sent.setdefault(id(value), []).append(end)

    def freeing(self, streams: Collection[Stream]) -> Callable[[Any], None]:
        """Return what to do with a value that is freed; first wait for the copies of some streams.

        Its sends have ended, and would keep its memory: they are waited for.
        """
        finish = self.ending(streams)

        def free(value: Any) -> None:
            if finish is not None:
                finish()
            for end in self._sent.pop(id(value), ()):
                end.wait()

        return free

    def ending(self, streams: Collection[Stream]) -> Step | None:
        """Return a step that waits for all copies of some streams."""
        return _waiting([end for stream in streams for end in self._by_stream.get(stream, ())])

    # ---- running

    def begin(self) -> None:
        """Begin a run: be ready to receive what is known to come."""
        self.group.check()
        self._sent.clear()
        for received in self._receives:
            received.post()

    @property
    def awaited(self) -> str:
        """The copies for which threads wait now."""
        return " and ".join(end.name for end in tuple(self.waiting.values()))

    def lost(self) -> None:
        """Give up the threads that still wait after a moment."""
        threading.Thread(target=self._give_up_all, daemon=True, name="lost").start()

    def _give_up_all(self) -> None:
        before = dict(self.waiting)
        time.sleep(_PATIENCE)
        for thread, end in before.items():
            if self.waiting.get(thread) is end:
                cause = self.group.lost(end.name, end.peer)
                if self.waiting.pop(thread, None) is not None:
                    self.give_up(thread, end.position, cause)


def _waiting(ends: Sequence[_End]) -> Step | None:
    if len(ends) < 2:
        return ends[0].wait if ends else None

    def wait() -> None:
        for end in ends:
            if end.started is not None:
                end.wait()

    return wait


class _End:
    """One end of a copy between ranks; several threads may wait for it.

    ``started`` are its works, until they have ended.
    """

    started: Sequence[Any] | None = None
    known: Any = None  # describes what is copied in each run; a receiver has alignments, too

    def __init__(
        self,
        exchange: Exchange,
        group: ProcessGroup,
        half: Send | Receive,
        position: int,
        peer: int,
        tag: int,
        device: torch.device | None,
        where: str,
    ):
        self.exchange = exchange
        self.group = group
        self.position = position
        self.stream = half.stream
        self.peer = peer
        self.name = f"{half}, {where}"
        self.value = half.value
        self.device = device
        ends = (group.rank, peer) if isinstance(half, Send) else (peer, group.rank)
        host = group.way(*ends)
        way = host if device is None else group.way(*ends, is_direct=True)
        self._ways = [each.send if isinstance(half, Send) else each.recv for each in (host, way)]
        self._tag = tag
        self._guard = threading.Lock()

    def start(self, rows: Sequence[torch.Tensor], is_description: bool = False) -> list[Any]:
        """Return the works of rows, or of a description. Raises the cause of a lost connection."""
        issue = self._ways[not is_description]
        if self.device is not None:  # NCCL knows few dtypes
            rows = [row.view(-1).view(torch.uint8) for row in rows]
        try:
            return [issue([row], self.peer, self._tag) for row in rows]
        except RuntimeError as error:
            raise self.group.lost(self.name, self.peer, error) from error

    def wait(self) -> None:
        """Wait for the end, if the copy has been started."""
        self.attended(self._wait)

    def attended(self, wait: Step) -> None:
        """Call a function that waits; the thread is given up if connections are lost meanwhile."""
        waiting = self.exchange.waiting
        thread = threading.get_ident()
        waiting[thread] = self
        try:
            if self.group.why is not None:
                self.exchange.lost()
            wait()
        finally:
            if waiting.pop(thread, None) is None:  # given up: its steps are those of another thread
                threading.Event().wait()

    def _wait(self) -> None:
        with self._guard:
            if self.started is not None:
                self.end(self.started)
                self.started = None

    def end(self, works: Sequence[Any]) -> None:
        """Wait for works. Raises the cause of a lost connection."""
        # On an accelerator, the current stream waits; a limit would let the host wait.
        limit = () if self.device is not None else (LIMIT,)
        try:
            for work in works:
                work.wait(*limit)
        except RuntimeError as error:
            raise self.group.lost(self.name, self.peer, error) from error


class _Send(_End):
    """Sends a value."""

    _last = ""

    def __call__(self, value: Any, _: Any) -> None:
        """Start to send a value."""
        described: Sequence[Any] = ()
        now = description_of(value, "cpu" if self.device is None else self.device.type)
        if self.known is None:
            described = self._describe(value, now)
        elif self.known != now:
            raise ScheduleError(
                f"{self.value!r} is {sizes(value)}, and was {self._last} in the first run; shapes "
                "and dtypes between ranks are those of the first run: make a schedule for each"
            )
        works = self.start(rows(value))
        if self.device is not None:
            self.end(works)  # the current stream waits
        else:
            self.started = [*described, *works]
            self.exchange.sent(value, self)

    def _describe(self, value: Any, description: Description) -> list[Any]:
        """Start to send the description of a value; return the works."""
        data = json.dumps([description, alignments(value)]).encode()
        if len(data) > _LONGEST:
            raise ScheduleError(f"{self.value!r} has too many parts to be sent to another rank")
        row = torch.zeros(_LONGEST, dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.known = description if is_fixed(description) else None
        self._last = sizes(value)
        return self.start([row], is_description=True)


class _Receive(_End):
    """Receives a value, into the memory of the last run if that is free."""

    is_pinned = False  # whether the memory is page-locked
    _buffer: ReceiveBuffer | None = None
    _posted: list[Any] | None = None  # works that were started at the beginning of the run
    _into: Any = None  # memory that exists

    def post(self) -> None:
        """Be ready to receive, if it is known what comes, unless that is so already."""
        if self.known is None or self._posted is not None:
            return
        if self._buffer is None or not self._buffer.is_free():
            description, at = self.known
            self._buffer = ReceiveBuffer(description, at, self.device, self.is_pinned)
        self._posted = self.start(self._buffer.rows)

    def __call__(self, _: Any, into: Any) -> Any:
        """Start to receive a value, perhaps into memory that exists; return it."""
        if self.known is None:
            self.attended(self._learn)
        self.post()
        if not is_fixed(self.known[0]):
            self.known = None
        buffer = self._buffer
        assert buffer is not None
        self.started, self._posted, self._into = self._posted, None, into
        if self.device is not None:
            self.wait()
            self._buffer = None  # its memory is the program's
        # Who has the containers has the tensors: the buffer is not free then.
        return transform(lambda leaf: leaf, buffer.value) if into is None else into

    def _learn(self) -> None:
        """Wait for the description of a value."""
        row = torch.zeros(_LONGEST, dtype=torch.uint8)
        self.end(self.start([row], is_description=True))
        self.known = json.loads(bytes(row.numpy()).rstrip(b"\0"))
        self._buffer = None

    def end(self, works: Sequence[Any]) -> None:
        """Wait for works, and put what has arrived in its places."""
        super().end(works)
        if works is self.started:
            assert self._buffer is not None
            self._buffer.spread()
            if self._into is not None:
                overwritten(self._into, self._buffer.value)
                self._into = None


# ---- values as rows of bytes, and descriptions of them
#
# A value is a tensor, or a tree of tensors and plain data. Its description is JSON: shapes, strides
# and dtypes of tensors, and plain data themselves. With it, a receiver makes rows of the right size,
# and from these the value: with the strides of the original, and at its alignment, because results
# differ in the last bits otherwise.

Description = Any  # of JSON: a list that begins with the kind


def description_of(value: Any, kind: str = "cpu") -> Description:
    """Describe a value whose tensors are on a kind of device.

    Raises ScheduleError for what cannot be sent.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", *_facts(value, kind)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [description_of(item, kind) for item in value]]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", {key: description_of(item, kind) for key, item in value.items()}]
    if type(value) in (str, int, float, bool, type(None)):
        return ["plain", value]
    allowed = "tensors, numbers, strings, None, and lists, tuples and dicts of them can"
    raise ScheduleError(f"{shown(value)[:80]} cannot be sent to another rank; {allowed}")


def is_fixed(description: Description) -> bool:
    """Whether a description tells no plain data, which may be others in the next run."""
    kind, *rest = description
    if kind in ("tensor", "plain"):
        return bool(kind == "tensor")
    return all(map(is_fixed, rest[0].values() if kind == "dict" else rest[0]))


def _facts(tensor: torch.Tensor, kind: str) -> list[Any]:
    """Return shape, strides, dtype and flags."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != kind:
        what = f"a tensor of {tensor.layout} on {tensor.device}"
        where = "the CPU" if kind == "cpu" else kind
        raise ScheduleError(f"{what} cannot be sent to another rank; dense ones on {where} can")
    flags = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad and tensor.is_leaf)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [list(tensor.shape), list(tensor.stride()), dtype, *map(int, flags)]


def alignments(value: Any) -> list[int]:
    """Return the addresses of the tensors of a value, modulo the alignment."""
    return [tensor.data_ptr() % ALIGNMENT for tensor in _tensors(value)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value) if isinstance(leaf, torch.Tensor)]


def sizes(value: Any) -> str:
    """Describe the tensors of a value for an error message."""
    found = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in _tensors(value)]
    return ", ".join(found[:4]) + (" ..." if len(found) > 4 else "")


# ---- sending


def rows(value: Any) -> list[torch.Tensor]:
    """Return the elements of each tensor of a value as they are in memory.

    They are contiguous, and share memory with tensors that have no gaps.
    """
    return [_row(tensor) for tensor in map(_physical, _tensors(value)) if tensor.numel()]


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose bytes are in memory: without conjugate and negative bits."""
    if tensor.is_conj():
        return _physical(tensor.conj())
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    if span(tensor) <= tensor.numel() or overlaps_itself(tensor):
        return tensor.as_strided((span(tensor),), (1,))  # as it lies in memory
    return tensor.contiguous()


# ---- receiving


class ReceiveBuffer:
    """Memory for a value that arrives: ``rows`` to receive into, and ``value`` afterwards.

    It can serve the next run, too, if nothing else refers to the value any more. It is allocated by
    the current stream of a ``device``, or is host memory at alignments ``at``, perhaps ``pinned``.
    """

    def __init__(
        self,
        description: Description,
        at: Sequence[int],
        device: torch.device | None = None,
        pinned: bool = False,
    ):
        places = iter(at)

        def blank(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            place = next(places)
            if device is not None:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)
            reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            storage = storage_at(0 if 0 in shape else reach * dtype.itemsize, place, pinned)
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

        self.value = _make(description, blank)
        self._tensors = _tensors(self.value)
        detached = [tensor.detach() for tensor in self._tensors]
        self.rows = rows(detached)
        pairs = zip((_physical(one) for one in detached if one.numel()), self.rows, strict=True)
        self._packed = [(one, row) for one, row in pairs if one.data_ptr() != row.data_ptr()]
        del detached, pairs
        self._held = [*map(holders, self._tensors)]  # no variable refers to a tensor here

    def spread(self) -> None:
        """Put tensors that arrived packed in their places."""
        for apart, packed in self._packed:
            apart.copy_(packed)

    def is_free(self) -> bool:
        """Whether nothing else refers to the value, or to a view of it."""
        return self._held == [*map(holders, self._tensors)]


def _make(description: Description, blank: Callable[..., torch.Tensor]) -> Any:
    """Return such a value; its tensors have no contents yet."""
    kind, *rest = description
    match kind:
        case "tensor":
            return _empty(blank, *rest)
        case "list":
            return [_make(item, blank) for item in rest[0]]
        case "tuple":
            return tuple([_make(item, blank) for item in rest[0]])
        case "dict":
            return {key: _make(item, blank) for key, item in rest[0].items()}
    return rest[0]


def _empty(
    blank: Callable[..., torch.Tensor],
    shape: Sequence[int],
    strides: Sequence[int],
    name: str,
    conj: int,
    neg: int,
    grad: int,
) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ScheduleError(f"another rank sent a tensor of an unknown dtype, {shown(name)}")
    tensor = blank(shape, strides, dtype)
    tensor = torch._neg_view(tensor) if neg else tensor
    tensor = tensor.conj() if conj else tensor
    return tensor.requires_grad_() if grad else tensor
