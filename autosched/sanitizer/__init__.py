"""Find races in code that uses CUDA streams by hand, on simulated GPUs.

    detector   what happens on simulated GPUs, and what is wrong with it
    regions    which bytes a tensor covers
    lines      the user's lines and names
    order      vector clocks: which accesses are in no order
    findings   findings, advice and reports
    picture    the drawing of a finding

A reader: it watches what a function does on ``simulated_gpus``, and changes nothing of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autosched.sanitizer.detector import Detector
from autosched.sanitizer.findings import Access, Advice, Finding, Line, Report
from autosched.sanitizer.lines import compiled_call
from autosched.simulated_gpus import playing
from autosched.simulated_gpus.observer import Observer
from autosched.simulated_gpus.tensors import memory_of

__all__ = ["Access", "Advice", "Finding", "Line", "Report", "Watching", "sanitize", "watching"]

_ORDERS = 12  # of streams, that are tried where something was found


class Watching:
    """What is found while the ``with`` statement of ``watching`` lasts."""

    def __init__(self, detector: Detector):
        self.detector = detector
        self.result: Any = None

    @property
    def report(self) -> Report:
        """What was found so far."""
        detector = self.detector
        return Report(
            detector.findings(),
            detector.advice(),
            tuple(detector.notes),
            self.result,
            detector.operations,
            detector.work(),
        )


@contextlib.contextmanager
def watching(gpus: int = 1, numbers: bool = False) -> Iterator[Watching]:
    """Simulate GPUs, and watch what is done on them, in a ``with`` statement.

    They are simulated on the CPU, by CUDA's rules for streams, events, memory and captured graphs,
    so no GPU is needed. ``report`` of what the statement yields has what was found, during and after
    it. See ``sanitize`` for ``numbers``. Raises RealGPUsError where torch finds a real GPU.

    >>> import torch, autosched as asc
    >>> with asc.testing.simulated_gpus() as gpus:
    ...     side = torch.cuda.Stream()
    ...     x = torch.ones(3, device="cuda")
    ...     with torch.cuda.stream(side):
    ...         y = x + 1
    >>> [(finding.kind, finding.tensor) for finding in gpus.report.findings]
    [('race', 'x')]
    """
    with playing(gpus, numbers=numbers) as hardware:
        hardware.eagerness = 2.0  # all runs when it is issued: nothing is left to chance
        hardware.observer = detector = Detector(hardware)
        try:
            yield Watching(detector)
        except Exception as error:
            if name := compiled_call(error):
                error.add_note(
                    f"Compiled functions such as {name} find no GPU. If it starts a kernel, say what it "
                    f"writes, before: asc.testing.declare({name}, writes=...), or instead=..."
                )
            raise
        finally:
            hardware.observer = Observer()
            hardware.faults.clear()


def sanitize(
    fn: Callable[..., Any], *args: Any, gpus: int = 1, numbers: bool = False, **kwargs: Any
) -> Report:
    """Find races in a function that uses CUDA streams, without a GPU.

    The function is called once on simulated GPUs. Each two accesses that some legal execution
    reverses are found in every run, also where this run had them in the right order. By default,
    operators compute shapes and no numbers, so models of any size can be checked, and numbers that
    the host reads are zero. With ``numbers`` they are computed on the CPU; if there are findings, the
    function is then called again, with copies of the arguments, while streams progress in other
    orders, and the report says what changed. The results, and tensors and modules among the
    arguments, are taken to be used by the caller afterwards, on its current streams.

    Raises what the function raises, and RealGPUsError where torch finds a real GPU.

    >>> import torch, autosched as asc
    >>> def step(x):
    ...     side = torch.cuda.Stream()
    ...     x = x.cuda(non_blocking=True)
    ...     with torch.cuda.stream(side):
    ...         y = x * 2
    ...     torch.cuda.current_stream().wait_stream(side)
    ...     return y
    >>> print(asc.sanitize(step, torch.ones(3)).findings[0].fix)
    side.wait_stream(torch.cuda.default_stream(0)), before <doctest ...>:5, in step
    """
    again = copy.deepcopy((args, kwargs)) if numbers else ((), {})
    state = torch.get_rng_state()
    before: list[torch.Tensor] = []
    with watching(gpus, numbers) as watched:
        detector = watched.detector
        try:
            watched.result = fn(*args, **kwargs)
        except RuntimeError:
            if not any(finding.kind == "graph" for finding in detector.findings()):
                raise
        given = [
            item
            for leaf in tree_leaves((args, kwargs))
            for item in (leaf.parameters() if isinstance(leaf, torch.nn.Module) else (leaf,))
        ]
        detector.returned(watched.result, given)
        if numbers:
            before = _numbers(_tensors(watched.result))
    report = watched.report
    if not (numbers and report.findings):
        return report
    outcome = _played(fn, again, gpus, before, state)
    return replace(report, findings=tuple(replace(f, outcome=outcome) for f in report.findings))


def _tensors(results: Any) -> list[torch.Tensor]:
    """Return the tensors and numbers among results, those of the host first."""
    kinds = (torch.Tensor, int, float)
    leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, kinds)]
    found = [x if isinstance(x, torch.Tensor) else torch.tensor(float(x)) for x in leaves]
    return sorted(found, key=lambda item: item.is_cuda)


def _numbers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of what tensors hold now."""
    with torch.no_grad():
        held = [memory_of(item.detach()) for item in tensors]
        with torch._C._DisableTorchDispatch():
            return [item.clone() for item in held]


def _played(fn: Callable[..., Any], call: Any, gpus: int, before: list[Any], state: Any) -> str:
    """Call a function while streams progress in other orders; return what changed."""
    for seed in range(_ORDERS):
        args, kwargs = copy.deepcopy(call)
        torch.set_rng_state(state)
        try:
            with playing(gpus, seed) as hardware:
                results = fn(*args, **kwargs)
                early = _numbers([item for item in _tensors(results) if not item.is_cuda])
                for device in range(gpus):
                    hardware.synchronize_device(device)
                late = _numbers([item for item in _tensors(results) if item.is_cuda])
        except Exception as error:
            return f"order {seed}: {type(error).__name__}: {error}"
        now = [torch.nan_to_num(item) for item in (*early, *late)]
        if not all(map(torch.equal, map(torch.nan_to_num, before), now)):
            return f"order {seed}: the results differ"
    return f"no order of {_ORDERS} that were tried changed a number of the results"
