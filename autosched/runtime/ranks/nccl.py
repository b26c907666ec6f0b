"""Send and receive rows of bytes between accelerators of different ranks, over NCCL.

The rules of NCCL that this module follows; none of it has run on hardware yet.

1. A communicator executes its operations in the order of issue, and a send may block until it is
   received. So what a rank sends and what it receives use different communicators: one for each
   directed pair of ranks, or one for each *colour* (``wire.colour``) where those are fewer.
2. Operations between two ranks match in the order of issue; tags are ignored. Each copy has one
   position in the program of all ranks, and all issue in that order.
3. One thread issues. Its stream waits for each operation, so that at most one send and one receive
   of an accelerator are in flight. Each takes multiprocessors while it waits; their number is capped.
4. Communicators are made eagerly, by all their ranks in one order, and so is the first exchange of
   each pair, which blocks the host.
5. Calls are batches of one, so that torch uses the communicator of the group. A single ``isend``
   may make another one, lazily.
6. NCCL does not notice that a process of the same host was killed. The wire over gloo does, and
   losing it aborts the communicators. Their works end then, with any contents: callers have to ask
   whether the wire was lost after they have waited.

Doubts, which only hardware can settle:

- Groups of more than two ranks, and several ranks with groups of their own, do not meet (see
  ``machine.sharing``), so ``Machine.cluster`` gives such ranks no direct network.
- The documentation of ``batch_isend_irecv`` wants all ranks of a group in its first call. Here two
  of them make it; communicators are made eagerly before, which should be enough.
- The heartbeat monitor of torch may end a process in which an abort takes long.
- The calling thread makes communicators and the first exchange, and another one issues the copies,
  afterwards: never both at once, which is what NCCL asks for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed

from autosched.runtime.ranks.wire import colour

__all__ = ["Channel", "Communicator", "Connect", "NcclWire", "channels", "nccl_communicator"]

_torch: Any = torch.distributed  # some of whose classes have no types
_FOREVER = timedelta(days=1)
_MOST_CTAS = 8  # multiprocessors that a send or a receive may occupy; not measured

Arc = tuple[int, int]  # the ranks of a sender and of its receiver


class Channel(NamedTuple):
    """A communicator to be made: its name and its ranks."""

    name: str
    ranks: tuple[int, ...]


class Communicator(Protocol):
    """What ``NcclWire`` needs of a communicator; ``peer`` is a rank of all."""

    def send(self, row: torch.Tensor, peer: int) -> Any:
        """Start to send on the current stream, and return the work."""

    def receive(self, row: torch.Tensor, peer: int) -> Any:
        """Start to receive on the current stream, and return the work."""

    def abort(self) -> None:
        """End all pending works."""


Connect = Callable[[Channel], Communicator]  # collective among the ranks of the channel


def channels(arcs: Collection[Arc]) -> dict[Arc, Channel]:
    """Return the channel of each directed pair, in the order in which channels are made.

    >>> [channel.name for channel in channels([(1, 0), (0, 1)]).values()]
    ['0 to 1', '1 to 0']
    """
    members: dict[int, set[int]] = {}
    neighbours: dict[int, int] = {}
    for arc in arcs:
        members.setdefault(colour(*arc), set()).update(arc)
        for rank in arc:
            neighbours[rank] = neighbours.get(rank, 0) + 1
    if max(neighbours.values(), default=0) <= len(members):
        return {arc: Channel(f"{arc[0]} to {arc[1]}", arc) for arc in sorted(arcs)}
    found: dict[Arc, Channel] = {}
    for arc in sorted(arcs, key=lambda arc: (colour(*arc), arc)):
        ranks = tuple(sorted(members[colour(*arc)]))
        found[arc] = Channel(f"colour {colour(*arc)} of {ranks}", ranks)
    return found


class NcclWire:
    """The communicators of a rank, until they are lost.

    Rows are in the memory of the rank's accelerator. A work is waited for once, with the stream
    current on which it was started.
    """

    def __init__(self, rank: int, connect: Connect):
        self.rank = rank
        self.is_lost = False
        self._connect = connect
        self._made: dict[Channel, Communicator] = {}
        self._arcs: dict[Arc, Communicator] = {}

    def open(self, arcs: Collection[Arc], blank: Callable[[], torch.Tensor]) -> None:
        """Make what is missing for these pairs, and exchange a row over each.

        Collective: all ranks of the pairs call it, in one order. ``blank`` makes a row.
        """
        mine = {arc: at for arc, at in channels(arcs).items() if self.rank in at.ranks}
        for channel in dict.fromkeys(mine.values()):
            if channel not in self._made:
                self._made[channel] = self._connect(channel)
        for arc, channel in mine.items():
            if self.rank not in arc or arc in self._arcs:
                continue
            self._arcs[arc] = self._made[channel]
            source, target = arc
            if source == self.rank:
                self.send(blank(), target).wait()
            else:
                self.receive(blank(), source).wait()

    def send(self, row: torch.Tensor, rank: int) -> Any:
        """Start to send a row on the current stream, and return the work."""
        return self._arcs[self.rank, rank].send(row, rank)

    def receive(self, row: torch.Tensor, rank: int) -> Any:
        """Start to receive a row of the same size, and return the work."""
        return self._arcs[rank, self.rank].receive(row, rank)

    def lose(self) -> None:
        """Abort all communicators, here; other ranks learn of it over gloo.

        Each in a thread of its own, because one abort may wait for another.
        """
        self.is_lost = True
        for made in self._made.values():
            threading.Thread(target=made.abort, name="abort NCCL", daemon=True).start()


class _Nccl:
    """A communicator of torch's."""

    def __init__(self, ranks: Sequence[int], device: torch.device):
        options = _torch.ProcessGroupNCCL.Options()
        options.config.max_ctas = _MOST_CTAS
        options._timeout = _FOREVER  # torch warns where the two differ
        with _without_own_handling():
            self.group = _torch.new_group(
                [*ranks],
                timeout=_FOREVER,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=True,  # others need not take part
                device_id=device,  # eagerly
            )

    def send(self, row: torch.Tensor, peer: int) -> Any:
        return self._started(_torch.isend, row, peer)

    def receive(self, row: torch.Tensor, peer: int) -> Any:
        return self._started(_torch.irecv, row, peer)

    def _started(self, operation: Any, row: torch.Tensor, peer: int) -> Any:
        (work,) = _torch.batch_isend_irecv([_torch.P2POp(operation, row, peer, self.group)])
        return work

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.group.abort()


@contextlib.contextmanager
def _without_own_handling() -> Iterator[None]:
    """Keep torch's watchdog from ending the process when a communicator is aborted."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def nccl_communicator(device: torch.device) -> Connect:
    """Return what makes communicators of a device."""

    def connect(channel: Channel) -> Communicator:
        return _Nccl(channel.ranks, device)

    return connect
