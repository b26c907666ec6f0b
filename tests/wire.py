"""Run the parts of all ranks in one thread, over a simulated wire.

So the interleavings of several processes can be explored without any process. The wire matches
sends and receives between two devices by their numbers in the parts. Its modes:

    rendezvous    a send and its receive take effect together, when both are next on their streams
    buffered      a send takes effect at once; what it sent waits for its receive
    one by one    as rendezvous, but each rank does one thing at a time, in the order of its part

A real transport is somewhere between: gloo is the first or the last, NCCL buffers small messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autosched._lib.tree import flatten
from autosched.errors import ProgramError
from autosched.graph.graph import Graph, no_grad
from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Wait,
    occupied,
)
from autosched.program.residency import Buffers
from autosched.runtime.backends.host import copy_in_host_memory
from tests.loop_model import call, sources

__all__ = ["MODES", "Mode", "run_parts"]

Mode = Literal["rendezvous", "buffered", "one by one"]
MODES: tuple[Mode, ...] = ("rendezvous", "buffered", "one by one")
_Key = tuple[str, str, int]  # the devices of an exchange, and its number between them


def run_parts(
    parts: Sequence[Program],
    graph: Graph,
    inputs: Mapping[str, Any],
    mode: Mode,
    choose: Callable[[Sequence[str]], str],
    nbytes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Run the parts of all ranks; return the outputs of all.

    ``choose`` gets the names of what can continue, and returns one of them. ``nbytes`` has the
    bytes of each value: a larger message for it is refused, as gloo aborts a receiver. Raises
    ProgramError for that, and if no rank can continue.
    """
    wire = _Wire(parts, graph, inputs, mode, nbytes or {})
    with no_grad():
        while ready := wire.ready():
            wire.step(ready[choose(sorted(ready))])
    if heads := wire.heads():
        waiting = "; ".join(f"{head.stream} {head}" for head in heads)
        raise ProgramError(f"no rank can continue: {waiting}")
    return wire.outputs()


def _ends(instruction: Instruction) -> tuple[str, str] | None:
    """Return the devices that a send or a receive joins."""
    match instruction:
        case Send(stream, destination=device):
            return stream.device, device
        case Receive(stream, source=device):
            return device, stream.device
    return None


class _Item(NamedTuple):
    """An instruction of a rank, and its position there."""

    rank: int
    at: int


class _Rank:
    """The memory of one rank."""

    def __init__(self, part: Program, graph: Graph, inputs: Mapping[str, Any]):
        self.part = part
        self.graph = graph
        homes = {graph.value(name).index: device for name, device in part.inputs}
        self.buffers = Buffers(graph, homes)
        self.data = sources(graph, self.buffers, inputs)
        self.steps = {step.at: step for step in self.buffers.walk(part)}

    def sent(self, at: int) -> Any:
        """Return a copy of what a copy or a send reads."""
        (source,) = self.steps[at].reads
        return copy_in_host_memory(self.data[source], None)

    def receive(self, at: int, item: Any, overwrite: bool) -> None:
        """Put what was received where it belongs."""
        (made,) = self.steps[at].made
        assert made is not None
        self.data[made] = copy_in_host_memory(item, self.data[made]) if overwrite else item

    def free(self, at: int) -> None:
        """Forget a block, and what shares its memory."""
        (freed,) = self.steps[at].reads
        for buffer in [b for b in self.data if b.block is freed.block]:
            del self.data[buffer]

    def outputs(self) -> dict[str, Any]:
        """Return the outputs that are on this rank."""
        found = {}
        for label, device in self.part.outputs:
            value = self.graph.outputs[label]
            last = self.graph.last_version(value)
            found[label] = self.data[self.buffers.find(value, last, device)]
        return found


class _Wire:
    """The queues of all ranks and what is between them."""

    def __init__(
        self,
        parts: Sequence[Program],
        graph: Graph,
        inputs: Mapping[str, Any],
        mode: Mode,
        nbytes: Mapping[str, int],
    ):
        self.parts = parts
        self.graph = graph
        self.ranks = [_Rank(part, graph, inputs) for part in parts]
        self.mode = mode
        self.nbytes = nbytes
        self.recorded: set[tuple[int, int]] = set()  # rank, event
        self.buffered: dict[_Key, Any] = {}
        self.queues: dict[str, list[_Item]] = {}  # what is left, the next one last
        self.keys: dict[_Item, _Key] = {}
        for rank, part in enumerate(parts):
            self._add(rank, part)
        for queue in self.queues.values():
            queue.reverse()

    def _add(self, rank: int, part: Program) -> None:
        """Add the instructions of a rank to its queues."""
        count: Counter[tuple[bool, str, str]] = Counter()
        for at, instruction in enumerate(part):
            item = _Item(rank, at)
            for stream in occupied(instruction):
                name = f"rank {rank}" if self.mode == "one by one" else str(stream)
                queue = self.queues.setdefault(name, [])
                if item not in queue[-1:]:
                    queue.append(item)
            ends = _ends(instruction)
            if ends is not None:
                side = isinstance(instruction, Send), *ends
                self.keys[item] = (*ends, count[side])
                count[side] += 1

    def instruction(self, item: _Item) -> Instruction:
        return self.parts[item.rank].instructions[item.at]

    def outputs(self) -> dict[str, Any]:
        """Return the outputs on all ranks."""
        found: dict[str, Any] = {}
        for rank in self.ranks:
            found |= rank.outputs()
        return {label: found[label] for label in self.graph.outputs}

    def heads(self) -> list[Instruction]:
        """Return the next instruction of each queue."""
        return [self.instruction(queue[-1]) for queue in self.queues.values() if queue]

    def ready(self) -> dict[str, list[_Item]]:
        """Return what can take effect, by queue: an instruction, or a send and its receive."""
        heads = {name: queue[-1] for name, queue in self.queues.items() if queue}
        receives = {
            self.keys[item]: item
            for item in heads.values()
            if isinstance(self.instruction(item), Receive)
        }
        found: dict[str, list[_Item]] = {}
        for name, item in heads.items():
            match self.instruction(item):
                case Wait(_, event):
                    can = (item.rank, event) in self.recorded
                case Copy() as copy if self.mode != "one by one":
                    can = all(heads.get(str(stream)) == item for stream in occupied(copy))
                case Send() if self.mode != "buffered":
                    other = receives.get(self.keys[item])
                    if other is not None:
                        found[name] = [item, other]
                    continue
                case Receive():
                    can = self.keys[item] in self.buffered
                case _:
                    can = True
            if can:
                found[name] = [item]
        return found

    def step(self, items: Sequence[_Item]) -> None:
        """Let an instruction, or a send and its receive, take effect."""
        for item in items:
            self._effect(item)
            for queue in self.queues.values():
                if queue and queue[-1] == item:
                    queue.pop()

    def _effect(self, item: _Item) -> None:
        rank = self.ranks[item.rank]
        match self.instruction(item):
            case Run():
                call(rank.steps[item.at], rank.data)
            case Copy(overwrite=overwrite):
                rank.receive(item.at, rank.sent(item.at), overwrite)
            case Send():
                self.buffered[self.keys[item]] = rank.sent(item.at)
            case Receive(value=value, overwrite=overwrite):
                message = self.buffered.pop(self.keys[item])
                self._check(value, message)
                rank.receive(item.at, message, overwrite)
            case Record(_, event):
                self.recorded.add((item.rank, event))
            case Free():
                rank.free(item.at)

    def _check(self, value: str, message: Any) -> None:
        """Raise ProgramError for a message that is larger than the buffer of its receiver."""
        size = sum(getattr(leaf, "nbytes", 0) for leaf in flatten(message))
        if size > self.nbytes.get(value, size):
            what = f"a message of {size} B for {value!r}"
            raise ProgramError(f"{what}, which has {self.nbytes[value]} B")
