"""Who runs a network: plain PyTorch, one CUDA graph, ``torch.compile``, autosched by streams and by replay, CUDASTF.

Each is a function without arguments that returns the scores of a batch: of two copies of it, in turn, since those who
replay would otherwise find it where it was. What a machine cannot do, or a package that is not there, raises
``LeftOut`` with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from _rig import Rig, race
from torch import Tensor, nn

import autosched as asc
from autosched import measurement
from autosched.frontends.capture import Captured
from autosched.graph.graph import called_with

Call = Callable[[], Any]
STREAMS = (1, 2, 4, 8)  # of which the number that is fastest here is taken


class LeftOut(Exception):  # noqa: N818
    """Why somebody does not take part."""


class Entry(NamedTuple):
    """What is called again and again; and the schedule behind it, if it is one of ours."""

    call: Call
    schedule: asc.Schedule | None = None


def entered(
    rig: Rig, makers: Mapping[str, Callable[[], Entry]]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return those who take part, and why the others do not."""
    entries: dict[str, Entry] = {}
    reasons: dict[str, str] = {}
    for name, make in makers.items():
        if name in rig.leave_out:
            reasons[name] = "asked to"
            continue
        try:
            entry = make()
            entry.call()
            rig.settle()
            entries[name] = entry
        except LeftOut as why:
            reasons[name] = str(why)
        except Exception as error:
            # One of many: what others found is worth having, and the report says what went wrong here.
            traceback.print_exc()
            first = next(iter(str(error).splitlines()), "")
            reasons[name] = f"failed: {type(error).__name__}: {first[:200]}"
    return entries, reasons


def close(entries: Mapping[str, Entry]) -> None:
    for entry in entries.values():
        if entry.schedule:
            entry.schedule.close()


def raced(
    rig: Rig,
    entries: dict[str, Entry],
    reasons: dict[str, str],
    rounds: int,
    *,
    only_issue: bool = False,
) -> dict[str, float]:
    """Return the seconds of each, of whom all have run twice; who does not replay and should leaves the race."""
    for name in [name for name in entries if "replay" in name]:
        schedule = entries[name].schedule
        if schedule is not None and schedule.not_replayed:
            del entries[name]
            reasons[name] = f"runs are not replayed: {schedule.not_replayed}"
    return race(
        rig, {name: entry.call for name, entry in entries.items()}, rounds, only_issue=only_issue
    )


# ---- what ours are told


def measured(
    rig: Rig,
    graph: asc.Graph,
    machine: asc.Machine,
    inputs: Mapping[str, Any],
    replayed: bool = False,
) -> asc.Costs:
    """Return the costs of a graph as they are measured on this machine; estimated, where GPUs are emulated."""
    if not rig.real:
        return asc.Costs.estimate(graph, inputs)
    rig.warm_clocks()
    return asc.measure_costs(graph, machine, inputs, replay=replayed)


@functools.cache
def linked(rig: Rig, machine: asc.Machine) -> asc.Machine:
    """Return a machine with its links as they are measured, once."""
    return measurement.measured_links(machine) if rig.real else machine


def replaying(rig: Rig) -> dict[str, Any]:
    """Return what to tell ``schedule`` for its program to be replayed by CUDA graphs. Raises LeftOut."""
    if not rig.cuda:
        raise LeftOut("needs CUDA graphs")
    return {"replay": True}


# ---- networks


def eager(rig: Rig, model: nn.Module, x: Tensor) -> Entry:
    """Call the network."""
    turn = _twice(x)
    return Entry(lambda: model(next(turn)))


def _twice(x: Tensor) -> Iterator[Tensor]:
    return itertools.cycle([x, x.clone()])


def cuda_graph(rig: Rig, model: nn.Module, x: Tensor) -> Entry:
    """Capture the network on one stream, and replay it on a copy of the image."""
    if not rig.cuda:
        raise LeftOut("needs CUDA graphs")
    still, turn, side, graph = x.clone(), _twice(x), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(still)
    torch.cuda.current_stream().wait_stream(side)
    with _own_workspaces(), torch.cuda.graph(graph):  # not on `side`, which has a workspace
        scores = model(still)

    def call() -> Tensor:
        still.copy_(next(turn))
        graph.replay()
        return scores

    return Entry(call)


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Release cuBLAS workspaces before and after a capture.

    A graph must not keep the address of a workspace of the ordinary pool, which others may free.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def compiled(rig: Rig, model: nn.Module, x: Tensor) -> Entry:
    """Let Inductor compile the network, and replay it by CUDA graphs."""
    if rig.rehearse:
        raise LeftOut("takes a minute to compile")
    torch.compiler.reset()
    fast = torch.compile(model, mode="reduce-overhead")
    for _ in range(3):  # compile, record, replay
        fast(x)
    turn = _twice(x)
    return Entry(lambda: fast(next(turn)))


def streams(rig: Rig, model: nn.Module, x: Tensor, **how: Any) -> Entry:
    """Plan the captured network for some numbers of streams with measured costs, and take the plan that is fastest."""
    graph, inputs = _captured(model, x)
    costs = measured(rig, graph, rig.machine(cpu=False), inputs, bool(how))
    found: dict[float, Entry] = {}
    for count in STREAMS[-1:] if rig.rehearse else STREAMS:
        machine = rig.machine(streams=count, cpu=False)
        schedule = asc.schedule(graph, machine, costs=costs, inputs=rig.names[0], **how)
        entry = Entry(_scores(graph, schedule, x), schedule)
        seconds = _tried(rig, entry.call)
        if not found or seconds < min(found):
            found[seconds] = entry
        else:
            schedule.close()
    best = found.pop(min(found))
    for entry in found.values():
        assert entry.schedule is not None
        entry.schedule.close()
    return best


@functools.lru_cache(maxsize=1)  # for streams and for replay
def _captured(model: nn.Module, x: Tensor) -> tuple[Captured, dict[str, Any]]:
    """Return a network as a graph, and its inputs."""
    graph = asc.capture(model, x)
    return graph, graph.feed(x)


def _scores(graph: Captured, schedule: asc.Schedule, x: Tensor) -> Call:
    turn = itertools.cycle([graph.feed(one) for one in (x, x.clone())])
    return lambda: graph.finish(schedule(**next(turn)))


def _tried(rig: Rig, call: Call) -> float:
    """Return the least seconds of a few calls."""
    least = float("inf")
    for _ in range(1 if rig.rehearse else 8):
        rig.settle()
        start = time.perf_counter()
        call()
        rig.settle()
        least = min(least, time.perf_counter() - start)
    return least


def replay(rig: Rig, model: nn.Module, x: Tensor) -> Entry:
    """Do as ``streams``, replayed by CUDA graphs."""
    return streams(rig, model, x, **replaying(rig))


def stf(rig: Rig, model: nn.Module, x: Tensor) -> Entry:
    """Give the operators of the captured network to CUDASTF as tasks, tokens for what they read and write.

    Written against its documentation: https://nvidia.github.io/cccl/unstable/python/stf.html.
    """
    if not rig.cuda:
        raise LeftOut("needs CUDA")
    try:
        found = import_module("cuda.stf._experimental")
    except ImportError:
        raise LeftOut("package cuda-stf is not installed") from None
    graph, inputs = _captured(model, x)

    def call() -> Any:
        with found.context() as context:
            outputs, kept = _submitted(context, graph, inputs)
        del (
            kept
        )  # all tensors live until the context has ended: tokens order tasks and own no memory
        return graph.finish(outputs)

    return Entry(call)


def _submitted(
    context: Any, graph: asc.Graph, inputs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Submit all tasks, in order; return the outputs, and all that was made. What no task writes needs no token."""
    data, tokens = graph.bind(inputs), dict[int, Any]()
    root = [value.root for value in graph.values]
    for task in graph.tasks:
        written = dict.fromkeys(root[use.value] for use in (*task.changes, *task.outputs))
        read = dict.fromkeys(
            root[use.value] for use in task.reads if root[use.value] not in written
        )
        uses = [tokens[memory].read() for memory in read if memory in tokens]
        uses += [tokens[memory].rw() for memory in written if memory in tokens]
        for memory in written.keys() - tokens.keys():
            tokens[memory] = context.token()
            uses.append(tokens[memory].write())
        with context.task(*uses) as started, _stream_of(started):
            args, kwargs = called_with(task, data)
            data.update(task.results(_function(task)(*args, **kwargs)))
    return {label: data[value] for label, value in graph.outputs.items()}, data


def _stream_of(started: Any) -> Any:
    return torch.cuda.stream(torch.cuda.ExternalStream(started.stream_ptr()))


def _function(task: asc.Task) -> Callable[..., Any]:
    assert task.fn is not None
    return task.fn


CONTESTANTS: dict[str, Callable[[Rig, nn.Module, Tensor], Entry]] = {
    "eager": eager,
    "CUDA graph, one stream": cuda_graph,
    "torch.compile": compiled,
    "autosched, streams": streams,
    "autosched, replay": replay,
    "cuda-stf": stf,
}
