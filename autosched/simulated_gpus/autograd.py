"""Backward passes on the streams of forward passes, as autograd's engine has them on a GPU.

The engine takes tensors of simulated GPUs for meta tensors, and knows no streams for them. So its
nodes get hooks here, which do what ``torch/csrc/autograd/engine.cpp`` and ``input_buffer.cpp`` do:

* A node runs on the stream that was current, on the device of its forward operator, when it was
  made; a leaf's gradient is accumulated on the stream of the leaf's first use.
* A node waits for the nodes that its gradients come from, where these are on other streams, and
  gradients are added on the stream of the node that needs their sum.
* The first nodes wait for the caller's current streams; in the end, these wait for the streams of
  the last nodes, and of gradients that the caller asked for. They wait for no others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from autosched.simulated_gpus.hardware import Hardware, hardware
from autosched.simulated_gpus.queues import Mark, Queue
from autosched.simulated_gpus.tensors import block_of

Node = Any


class Backward:
    """One backward pass in this thread."""

    def __init__(self, gpus: Hardware, outputs: Iterable[Any], inputs: Iterable[Any]):
        self.gpus, self.callers = gpus, dict(gpus.current)
        self.roots = {node for item in outputs if (node := _node_of(item)) is not None}
        self.asked = [node for item in inputs if (node := _node_of(item)) is not None]
        self.nodes: dict[Node, int] = {}  # and the numbers of nodes that tell their streams
        self.pending: dict[Node, list[Mark]] = defaultdict(list)  # what a node comes behind
        self.arrived: set[tuple[Node, int]] = set()
        self.sums: deque[Node] = deque()  # nodes whose gradients the engine adds next
        self.running: list[tuple[Queue | None, int]] = []  # nodes, and the devices before
        self.last: list[Mark] = []
        self._find(self.roots)

    def _find(self, roots: Iterable[Node]) -> None:
        """Find all nodes; a leaf has the number of its first use."""
        leaf = 2**64 - 1
        open_ = list(roots)
        self.nodes.update((node, node._sequence_nr()) for node in open_)
        while open_:
            node = open_.pop()
            for other, _ in node.next_functions:
                if other is None:
                    continue
                number = other._sequence_nr()
                if other not in self.nodes:
                    open_.append(other)
                    self.nodes[other] = number
                if number == leaf:
                    self.nodes[other] = min(self.nodes[other], self.nodes[node])

    def queue(self, node: Node, device: int) -> Queue:
        """Return the queue of a node on a device."""
        return self.gpus.current.at(self.nodes[node])[device]

    def begin(self, node: Node, grads: Any) -> None:
        """Let a node run on its queue, behind those that its gradients come from."""
        blocks = list(filter(None, map(block_of, grads)))
        if not blocks:
            self.running.append((None, self.gpus.device))
            return
        device = blocks[0].queue.device
        queue = self.queue(node, device)
        if node in self.roots and not self.pending[node]:
            self._wait(queue, self.gpus.record(self.callers[device]))
        self._await(node, queue)
        for block in blocks:
            if block.queue is not queue:
                block.users.append(queue)
        self.running.append((self.gpus.current[device], self.gpus.device))
        self.gpus.device, self.gpus.current[device] = device, queue

    def end(self, node: Node, results: Any, _: Any) -> None:
        """Note what comes behind a node."""
        before, device = self.running.pop()
        if before is None:
            return
        queue = self.gpus.current[before.device]
        self.gpus.device, self.gpus.current[before.device] = device, before
        mark = self.gpus.record(queue)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if not edges:
            self.last.append(mark)
        given = [
            edge
            for edge, grad in zip(node.next_functions, results, strict=False)
            if grad is not None
        ]
        for other, number in given:
            if other is None:
                continue
            if (other, number) in self.arrived:
                self.sums.append(other)
            self.arrived.add((other, number))
            self.pending[other].append(mark)

    def adds_on(self, device: int) -> Queue | None:
        """Return the queue where the engine adds gradients now; None while a node runs."""
        if self.running or not self.sums:
            return None
        node = self.sums.popleft()
        queue = self.queue(node, device)
        self._await(node, queue)
        return queue

    def finish(self) -> None:
        """Let the caller's streams wait for the last nodes."""
        wanted = [mark for node in self.asked for mark in self.pending[node]]
        for mark in [*self.last, *wanted]:
            self._wait(self.callers[mark.queue.device], mark)

    def _await(self, node: Node, queue: Queue) -> None:
        for mark in self.pending[node]:
            self._wait(queue, mark)

    def _wait(self, queue: Queue, mark: Mark) -> None:
        if mark.queue is not queue:
            self.gpus.wait(queue, mark, asked=False)


def _node_of(item: Any) -> Node | None:
    """Return the node of a tensor that requires a gradient, or of an edge."""
    if not isinstance(item, torch.Tensor):
        return getattr(item, "node", None)
    if item.grad_fn is None and not item.requires_grad:
        return None
    return torch.autograd.graph.get_gradient_edge(item).node


def on_forward_streams(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return how backward is run: on the streams of the forward pass."""

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        gpus, inputs = hardware(), (args[3] if len(args) > 3 else ()) or ()
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if fake or not any(block_of(item) is not None for item in outputs):
            return original(outputs, *args, **kwargs)
        backward = Backward(gpus, outputs, inputs)
        handles = []
        for node in backward.nodes:
            handles.append(node.register_prehook(partial(backward.begin, node)))
            handles.append(node.register_hook(partial(backward.end, node)))
        outer, gpus.mine.backward = getattr(gpus.mine, "backward", None), backward
        try:
            results = original(outputs, *args, **kwargs)
        finally:
            gpus.mine.backward = outer
            for handle in handles:
                handle.remove()
            for device, queue in backward.callers.items():  # where a node has raised
                if gpus.current[device] is not queue:
                    gpus.current[device] = queue
        backward.finish()
        return results

    return run_backward
