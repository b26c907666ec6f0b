"""Run a graph serially, as the expected result of schedules.

Returns outputs, inputs as the run leaves them, and the results of tasks. State that tasks change
although it is not an input (constants, modules, optimizers) is restored after each run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autosched._lib.tree import flatten, match
from autosched.errors import InterleavingError
from autosched.graph.effects import is_uninitialized
from autosched.graph.graph import Graph, Task, Value
from autosched.runtime.backends.host import copy_in_host_memory
from autosched.runtime.check import Watcher
from autosched.testing.comparing import bits


class Setting:
    """Inputs and a seed, with which a graph is run repeatedly."""

    def __init__(self, graph: Graph, examples: Mapping[str, Any], seed: int):
        self.graph = graph
        self.examples = examples
        self.seed = seed
        self.shared = SharedState(graph)

    def run(
        self, call: Callable[[dict[str, Any]], Mapping[str, Any]], first: bool = False
    ) -> dict[str, Any]:
        """Call with fresh inputs; return the resulting state by name, and restore all else.

        Unless it is the ``first``, a serial run with other inputs precedes it: what tasks keep from
        run to run then differs from what the call leaves, and one that reads it too early is found.
        """
        accelerator = torch.accelerator.current_accelerator()
        kind = "cuda" if accelerator is None else accelerator.type
        count = torch.accelerator.device_count()
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            if not first:
                self._run_with_other_inputs()
            if count:
                torch.manual_seed(self.seed)
            else:  # faster: it seeds the CPU alone
                torch.default_generator.manual_seed(self.seed)
            inputs = copy.deepcopy(dict(self.examples))
            try:
                left = {}
                for name, item in call(inputs).items():
                    # A copy, since an output may be a constant, which is restored.
                    left[f"output {name!r}"] = copy_in_host_memory(item, None)
                left.update((f"input {name!r}", item) for name, item in inputs.items())
                return left | self.shared.copies()
            finally:
                self.shared.restore()

    def _run_with_other_inputs(self) -> None:
        """Run the graph once. Its errors are ignored: tasks may refuse the numbers."""
        inputs = copy.deepcopy(dict(self.examples))
        with torch.no_grad():
            for leaf in filter(torch.is_tensor, flatten(inputs)):
                with contextlib.suppress(RuntimeError):  # of tensors that cannot be written
                    leaf.copy_(_other_numbers(leaf))
        with contextlib.suppress(Exception):
            self.graph.run_serial(**inputs)
        self.shared.restore()


def _other_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with numbers of the same range."""
    moved = tensor.flatten().roll(1).view(tensor.shape)
    return moved * 0.75 if moved.is_floating_point() or moved.is_complex() else moved


class Reference:
    """The serial run of a graph: its result, and hashes of the results of each task.

    Raises InterleavingError if a second run differs, HazardError if a task has effects that it does
    not declare.

    >>> graph = Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> Reference(Setting(graph, {"x": 1}, seed=0)).results
    {"output 'y'": 2, "input 'x'": 1}
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self.graph = setting.graph
        self.traces: dict[str, int] = {}
        self.results = self._run(self.traces, first=True)
        again: dict[str, int] = {}
        self._run(again)
        task = self.first_difference(again)
        if task is not None:
            raise InterleavingError(
                f"two serial runs of graph {self.graph.name!r} with the same inputs and seed "
                f"differ, first in task {task.name!r}, added at {task.source}: it is not "
                f"deterministic, keeps state from run to run, or uses random numbers that "
                f"torch.manual_seed does not set"
            )

    def _run(self, traces: dict[str, int], first: bool = False) -> dict[str, Any]:
        graph = traced(watched(self.graph), traces)
        return self.setting.run(lambda inputs: graph.run_serial(**inputs), first)

    def first_difference(self, traces: Mapping[str, int]) -> Task | None:
        """Return the first task whose results differ in another run, of those that ran there."""
        for task in self.graph.tasks:
            if task.name in traces and traces[task.name] != self.traces[task.name]:
                return task
        return None


def traced(graph: Graph, traces: dict[str, int]) -> Graph:
    """Return a copy of a graph whose tasks store a hash of their results and arguments."""

    def traced(task: Task, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            if not is_uninitialized(fn):
                traces[task.name] = hash(bits((args, kwargs, result)))
            return result

        return call

    return _with_functions(graph, traced)


def watched(graph: Graph) -> Graph:
    """Return a copy whose tasks raise HazardError for undeclared writes, aliases, random numbers.

    All kinds of writes are found, because bytes are compared.
    """
    watcher = Watcher(graph, "bytes", lambda value: False)

    def watched(task: Task, fn: Callable[..., Any]) -> Callable[..., Any]:
        shape = task.args, task.kwargs
        leaves = list(flatten(shape))

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            pairs = zip(leaves, match(shape, (args, kwargs)), strict=True)
            given = {leaf.index: item for leaf, item in pairs if isinstance(leaf, Value)}
            returned: list[Any] = []
            watcher.around(
                task,
                lambda: returned.append(fn(*args, **kwargs)),
                lambda: [given[use.value] for use in task.reads],
                lambda: [item for index, item in task.results(returned[0]) if graph.is_used(index)],
            )()
            return returned[0]

        return call

    return _with_functions(graph, watched)


def _with_functions(
    graph: Graph, change: Callable[[Task, Callable[..., Any]], Callable[..., Any]]
) -> Graph:
    """Return a pinned copy of a graph with the function of each task changed."""
    twin = graph.pinned()
    twin.tasks[:] = [
        # What reads a file stays: storage gives it to the copy that reads.
        task if task.fn is None or task.reads_file else replace(task, fn=change(task, task.fn))
        for task in graph.tasks
    ]
    return twin


class SharedState:
    """Saved values of the state that tasks use without reading it as a value.

    >>> graph, total = Graph(), torch.zeros(())
    >>> _ = graph.constant(total, "total").add_(1)
    >>> state = SharedState(graph)
    >>> _ = graph.run_serial(), state.restore()
    >>> total
    tensor(0.)
    """

    def __init__(self, graph: Graph):
        shared = list({id(item): item for task in graph.tasks for item in task.shared}.values())
        written = [v for v in graph.sources if v.tensor is not None and graph.last_version(v.index)]
        self.tensors = [(f"constant {value.name!r}", value.tensor) for value in written]
        for module in shared:
            if isinstance(module, torch.nn.Module):  # submodules are shared items themselves
                kind = type(module).__name__
                buffers = module.named_buffers(recurse=False)
                for name, tensor in (*module.named_parameters(recurse=False), *buffers):
                    self.tensors.append((f"{name!r} of a {kind}", tensor))
        known = {id(tensor) for _, tensor in self.tensors}
        for item in shared:
            if hasattr(item, "data_ptr") and id(item) not in known:
                self.tensors.append(("a parameter", item))
        self._saved = [(tensor.detach().clone(), _clone(tensor.grad)) for _, tensor in self.tensors]
        optimizers = [item for item in shared if isinstance(item, torch.optim.Optimizer)]
        self._states = [(item, copy.deepcopy(item.state_dict())) for item in optimizers]

    def restore(self) -> None:
        """Restore everything."""
        with torch.no_grad():
            for (_, tensor), (saved, grad) in zip(self.tensors, self._saved, strict=True):
                tensor.copy_(saved)
                tensor.grad = _clone(grad)
        for optimizer, state in self._states:
            optimizer.load_state_dict(copy.deepcopy(state))

    def copies(self) -> dict[str, Any]:
        """Return copies of the tensors, by name."""
        tensors = enumerate(self.tensors)
        return {f"{what} ({i})": tensor.detach().clone() for i, (what, tensor) in tensors}


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
