"""Compile regions in which the weights of modules are constants, as inference does elsewhere.

``Frozen`` is a compiler for ``fuse=``. It knows graphs of operators and tensors, and neither tasks
nor regions. Inductor's public option ``freezing`` folds operators on constants, such as batch norms
into convolutions, and stores weights as the libraries of kernels like them.

A call compares the addresses and version counters of weights with those that were compiled. After a
change, the weights are arguments again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autosched.errors import ScheduleError, shown
from autosched.fusion.inductor import LOCK, compile_graph

_MOST = 64  # sets of weights, such as those of the layers that share one compiled function


class Frozen:
    """A compiler for ``fuse=``: Inductor, with the weights of these modules as constants.

    For inference on modules in evaluation mode. Constants take memory once more. When a weight
    changes, as by an optimizer, ``load_state_dict`` or ``to``, a RuntimeWarning says so, and the
    regions that read it are compiled again without constants. As elsewhere, writes through
    ``tensor.data``, NumPy and DLPack have no version counter: they are only noticed by comparisons
    in some runs, so do not use them. Raises ScheduleError for what is no module in evaluation mode.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2).eval()
    >>> run = asc.compile(model, asc.Machine.emulated(gpus=0), fuse=asc.Frozen(model))
    """

    def __init__(self, *modules: torch.nn.Module):
        for module in modules:
            if not isinstance(module, torch.nn.Module) or module.training:
                what = "Frozen() takes modules in evaluation mode, as of model.eval()"
                raise ScheduleError(f"{what}, got {shown(module)}")
        self.modules = modules

    def __call__(
        self, graph: torch.fx.GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        """Return a function of such tensors; weights among them are constants."""
        return _Call(self, graph, examples)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of a weight whose changes are counted."""
        if tensor.is_inference() or tensor.layout is not torch.strided:
            return False
        memory = tensor.untyped_storage()._cdata
        return any(
            memory == weight.untyped_storage()._cdata
            for module in self.modules
            for weight in (*module.parameters(), *module.buffers())
            if weight.layout is torch.strided
        )


class _Compiled(NamedTuple):
    """A function for weights of these addresses, and their versions."""

    versions: tuple[int, ...]
    run: Callable[..., Sequence[Tensor]]


class _Call:
    """A compiled graph; its functions are made when they are needed."""

    def __init__(self, frozen: Frozen, graph: torch.fx.GraphModule, examples: list[Tensor]):
        self.frozen = frozen
        self.graph = graph
        self.examples = examples
        self.compiled: dict[tuple[int, ...], _Compiled] = {}
        self.plain: Callable[..., Sequence[Tensor]] | None = None
        copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {node.args[0] for node in copies}
        inputs = graph.graph.find_nodes(op="placeholder")
        self.readable = [i for i, node in enumerate(inputs) if node not in written]
        self.places: list[int] | None = None  # of weights; None until the first call with some

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        """Run with weights as constants, if they are as they were compiled."""
        if not self.places:
            self.places = [i for i in self.readable if self.frozen.owns(args[i])]
        weights = [args[i] for i in self.places]
        known = self.compiled.get(key := tuple(weight.data_ptr() for weight in weights))
        if known is None:
            known = self._compile(key, args)
        if any(w._version != v for w, v in zip(weights, known.versions, strict=False)):
            known = self._changed(key, args)
        if known.run is self.plain:
            return known.run(*args)
        places = {*self.places}
        return known.run(*(arg for i, arg in enumerate(args) if i not in places))

    def _compile(self, key: tuple[int, ...], args: Sequence[Tensor]) -> _Compiled:
        assert self.places is not None
        with LOCK:
            if key not in self.compiled:
                is_frozen = key and len(self.compiled) < _MOST
                is_frozen = is_frozen and all(map(self.frozen.owns, (args[i] for i in self.places)))
                if not is_frozen:
                    return _Compiled((), self._without_constants())
                run = compile_graph(self.graph, args, torch.get_num_threads(), self.places)
                versions = tuple(args[i]._version for i in self.places)
                self.compiled[key] = _Compiled(versions, run)
        return self.compiled[key]

    def _changed(self, key: tuple[int, ...], args: Sequence[Tensor]) -> _Compiled:
        what = "weights have changed since they were compiled as constants"
        warnings.warn(f"{what}; regions that read them take them as arguments from now on",
                      RuntimeWarning, stacklevel=2)  # fmt: skip
        self.compiled[key] = _Compiled((), self._without_constants())
        return self.compiled[key]

    def _without_constants(self) -> Callable[..., Sequence[Tensor]]:
        with LOCK:
            if self.plain is None:
                self.plain = compile_graph(self.graph, self.examples, torch.get_num_threads())
        return self.plain
