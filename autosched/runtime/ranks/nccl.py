"""Send and receive rows of bytes between GPUs of different ranks, over NCCL.

The rules of NCCL that this module follows; none of it has run on hardware yet.

1. A communicator executes its operations in the order of issue, and a send may block until it is
   received. So what a GPU sends and what it receives use different communicators: directed pairs
   are divided into *colours*, in which no GPU both sends and receives (``wire.colour``), and each
   connected part of a colour has a communicator. A GPU is in no more of them than it has directed
   pairs, and in at most twice the logarithm of the number of GPUs. As its copies out run one after
   another anyway, and so do its copies in, none waits longer than it would with one for each pair.
   Colours of a bipartite graph of senders and receivers would be fewer, but in these a GPU both
   sends and receives, and a ring would make one copy after another.
2. Operations between two GPUs match in the order of issue; tags are ignored. Each copy has one
   position in the program of all ranks, and all issue in that order. So operations on several
   communicators of a GPU have one order everywhere, as NCCL demands.
3. One thread issues all operations of a process. A stream waits for each operation, so that at most
   one send and one receive of a GPU are in flight. Each takes multiprocessors while it waits; their
   number is capped.
4. Communicators are made eagerly, by all their GPUs in one order, and so is the first exchange of
   each pair, which blocks the host. Each GPU of a process has a thread for this, because several
   may be in one communicator.
5. Each end of a communicator is a ``ProcessGroupNCCL``, which is constructed here, as that of gloo
   is (see ``wire``). ``torch.distributed.new_group`` would need all ranks, or give groups of a few
   different names on each (torch 2.13); it has one rank for a process, not for a GPU; and in torch
   2.15 it makes another class. Connected eagerly, a group has a single communicator, also for sends
   that are no part of a batch.
6. NCCL does not notice that a process of the same host was killed. The wire over gloo does, and
   losing it aborts the communicators. Their works end then, with any contents: callers have to ask
   whether the wire was lost after they have waited. What is being made cannot be aborted: see
   ``direct``.

Doubts, which only hardware can settle:

- The heartbeat monitor of torch may end a process in which an abort takes long.
- NCCL may choose fewer channels for a communicator of GPUs that are joined in different ways.
- torch registers sent and received memory with NCCL's stream, so that it returns to the allocator
  later than the program frees it. Peaks may be above the prediction.
- The first run page-locks memory in threads of the host. If the driver lets this wait for a receive
  that is in flight, which waits for such a thread in turn, the run hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed

from autosched.runtime.ranks.wire import colour

__all__ = ["Arc", "Channel", "Communicator", "Connect", "NcclWire", "channels", "nccl_communicator"]

_torch: Any = torch.distributed  # some of whose classes have no types
_FOREVER = timedelta(days=1)
_MOST_CTAS = 8  # multiprocessors that a send or a receive may occupy; not measured
_LAST = 1.0  # seconds for an abort, at the end of a process
_SETTINGS = {  # of torch, while a group is constructed
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # or its watchdog ends the process after an abort
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # it is what rule 1 is for
}
_setting = threading.Lock()

Arc = tuple[int, int]  # the numbers of a GPU that sends and of one that receives, among all ranks


class Channel(NamedTuple):
    """A communicator to be made: its colour, and its GPUs in order."""

    colour: int
    gpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"colour {self.colour} of {', '.join(map(str, self.gpus))}"


class Communicator(Protocol):
    """A GPU's end of a communicator; ``peer`` is the number of another one."""

    def send(self, row: torch.Tensor, peer: int) -> Any:
        """Start to send on the current stream, and return the work."""

    def receive(self, row: torch.Tensor, peer: int) -> Any:
        """Start to receive on the current stream, and return the work."""

    def abort(self) -> None:
        """End all pending works."""


Connect = Callable[[Channel], Communicator]  # collective among the GPUs of the channel


def channels(arcs: Collection[Arc]) -> dict[Arc, Channel]:
    """Return the channel of each directed pair, in the order in which channels are made.

    >>> [str(channel) for channel in channels([(1, 0), (0, 1), (2, 1), (4, 5)]).values()]
    ['colour 0 of 0, 1, 2', 'colour 0 of 0, 1, 2', 'colour 0 of 4, 5', 'colour 1 of 0, 1']
    """
    parts: dict[int, list[set[int]]] = {}
    for arc in arcs:
        same = parts.setdefault(colour(*arc), [])
        joined = {*arc}.union(*(part for part in same if not part.isdisjoint(arc)))
        same[:] = [*(part for part in same if part.isdisjoint(arc)), joined]
    found: dict[Arc, Channel] = {}
    for source, target in sorted(arcs, key=lambda arc: (colour(*arc), arc)):
        number = colour(source, target)
        (gpus,) = (part for part in parts[number] if source in part)
        found[source, target] = Channel(number, tuple(sorted(gpus)))
    return found


class NcclWire:
    """The communicators of a GPU, until they are lost.

    Rows are in its memory. A work is waited for once, with the stream current on which it was
    started.
    """

    def __init__(self, gpu: int, connect: Connect):
        self.gpu = gpu
        self.is_lost = False
        self._connect = connect
        self._made: dict[Channel, Communicator] = {}
        self._arcs: dict[Arc, Communicator] = {}
        self._aborting: list[threading.Thread] = []

    def open(self, arcs: Collection[Arc], blank: Callable[[], torch.Tensor]) -> None:
        """Make what is missing for these pairs, and exchange a row over each.

        Collective: all GPUs of the pairs do so, in one order. ``blank`` makes a row. Raises
        RuntimeError where the wire is lost.
        """
        mine = {arc: at for arc, at in channels(arcs).items() if self.gpu in at.gpus}
        for channel in dict.fromkeys(mine.values()):
            if channel not in self._made:
                self._made[channel] = self._connect(channel)
            if self.is_lost:  # perhaps before it was made
                self._made[channel].abort()
                raise RuntimeError("the wire is lost")
        for arc, channel in mine.items():
            if self.gpu not in arc or arc in self._arcs:
                continue
            self._arcs[arc] = self._made[channel]
            source, target = arc
            if source == self.gpu:
                self.send(blank(), target).wait()
            else:
                self.receive(blank(), source).wait()

    def send(self, row: torch.Tensor, gpu: int) -> Any:
        """Start to send a row, and return the work."""
        return self._arcs[self.gpu, gpu].send(row, gpu)

    def receive(self, row: torch.Tensor, gpu: int) -> Any:
        """Start to receive a row of the same size, and return the work."""
        return self._arcs[gpu, self.gpu].receive(row, gpu)

    def lose(self) -> None:
        """Abort all communicators, here; other ranks learn of it over gloo.

        Each in a thread of its own, because one abort may wait for another.
        """
        if self.is_lost:
            return
        self.is_lost = True
        for made in tuple(self._made.values()):
            thread = threading.Thread(target=made.abort, name="abort NCCL", daemon=True)
            thread.start()
            self._aborting.append(thread)

    def join(self) -> None:
        """Wait a moment for aborts: a process must not end during one."""
        for thread in self._aborting:
            thread.join(_LAST)


class _Nccl:
    """A communicator of torch's."""

    def __init__(self, channel: Channel, gpu: int, device: torch.device, store: Any):
        self.gpus = channel.gpus
        options = _torch.ProcessGroupNCCL.Options()
        options.config.max_ctas = _MOST_CTAS
        options._timeout = _FOREVER
        options.global_ranks_in_group = [*channel.gpus]  # for messages of torch
        options.group_name = str(channel)
        own = _torch.PrefixStore(str(channel), store)
        place = self.gpus.index(gpu), len(self.gpus)
        with _set(_SETTINGS):
            self.group = _torch.ProcessGroupNCCL(own, *place, options)
        self.group.eager_connect_single_device(device)

    def send(self, row: torch.Tensor, peer: int) -> Any:
        return self.group.send([row], self.gpus.index(peer), 0)

    def receive(self, row: torch.Tensor, peer: int) -> Any:
        return self.group.recv([row], self.gpus.index(peer), 0)

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.group.abort()


@contextlib.contextmanager
def _set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, in one thread at a time."""
    with _setting:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def nccl_communicator(gpu: int, device: torch.device, store: Any, name: str) -> Connect:
    """Return what makes the ends of a GPU, whose number among all ranks is ``gpu``.

    Its ends meet those of others in ``store``, where each name serves each channel once.
    """
    store = _torch.PrefixStore(name, store.clone())  # who waits in a store holds up its other users
    store.set_timeout(_FOREVER)

    def connect(channel: Channel) -> Communicator:
        return _Nccl(channel, gpu, device, store)

    return connect
