"""Functions that all ranks of a machine call together, with equal arguments.

Each rank has all inputs: arguments, parameters, moments. So an input is wherever tasks read it, and
a run sends none that no task writes. Each output goes to all ranks, and so does what tasks wrote in
place: after a call, modules, optimizers and arguments are the same everywhere. Tasks that draw
random numbers run on the first rank, whose generator counts; the others get its state.

Ranks agree before each call that all of them use the same capture, and compare their graphs after
each capture. On an emulated machine, one process plays all ranks, and has nothing to agree on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched._lib.aliasing import are_apart, check_written
from autosched.errors import HazardError, ScheduleError, shown
from autosched.frontends.captured import Captured
from autosched.frontends.random_state import add_state
from autosched.graph.constraints import by_pattern
from autosched.graph.effects import counts_in_memory
from autosched.machine.cluster import joined
from autosched.machine.machine import Machine
from autosched.scheduling.arguments import check_arguments

_STATE = "random_state"
_ADDRESS = re.compile(r" at 0x\w+")  # in the text of an object


# ---- the graph


@dataclass(frozen=True)
class Ends:
    """What a rank does with the outputs of a run: its label of each, and of each written input."""

    outputs: Mapping[str, str | None]
    written: Mapping[str, str]
    random: str | None
    is_alone: bool  # the tensors of this process are those of all ranks

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise HazardError if inputs share memory that is written, and tell the other ranks.

        A rank would not see what another one writes.
        """
        try:
            self._check_apart(inputs)
        except HazardError as error:
            if not self.is_alone:
                joined().fail_by(error)
            raise

    def _check_apart(self, inputs: Mapping[str, Any]) -> None:
        if not self.written or are_apart(inputs.values()):
            return

        def matters(a: str, b: str) -> bool:
            return a != b and not self.written.keys().isdisjoint((a, b))

        cure = ", perhaps on another rank; pass a clone"
        check_written(inputs, self.written, matters, cure)

    def collect(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by their own names, and write what other ranks wrote."""
        if not self.is_alone:
            with torch.no_grad():
                for name, label in self.written.items():
                    if outputs[label] is not inputs[name]:
                        inputs[name].copy_(outputs[label])
            if self.random is not None:
                torch.set_rng_state(outputs[self.random])
        return {name: label and outputs.get(label) for name, label in self.outputs.items()}


def drawing_on_one(graph: Captured) -> None:
    """Let the state of the random number generator be an output, if tasks draw.

    Raises ScheduleError for other generators, whose state other ranks would not get.
    """
    if not any(task.random for task in graph.tasks):
        return
    if any(isinstance(value.tensor, torch.Generator) for value in graph.sources):
        raise ScheduleError(
            f"{graph.name!r} draws from a torch.Generator, which would advance on one rank only; "
            "use the default generator"
        )
    graph.output(**{_STATE: add_state(graph, _STATE)})


def on_every_rank(
    graph: Captured, machine: Machine, options: Mapping[str, Any]
) -> tuple[Captured, Ends, dict[str, Any]]:
    """Return a graph with inputs and outputs on all ranks, and options of ``schedule`` for it.

    Results of the function that the option ``outputs`` names are on that device alone. Raises
    ScheduleError for tasks that communicate by themselves.
    """
    _check(graph, machine)
    fronts: dict[int, str] = {}  # the first device of each rank
    for device, rank in machine.ranks.items():
        fronts.setdefault(rank, device)
    own = fronts[machine.rank or 0]
    given = _devices(graph, options.get("outputs"))
    twin = graph.snapshot()
    twin.on_all_ranks = True
    twin.outputs = {}
    devices: dict[str, str] = {}
    everyones: dict[str, list[str]] = {}  # labels on all devices, by name
    labels: dict[str, str | None] = {}

    def put(name: str, index: int, where: Sequence[str]) -> str | None:
        made = {device: f"{name}.{device}" for device in where}
        twin.outputs.update(dict.fromkeys(made.values(), index))
        devices.update({label: device for device, label in made.items()})
        everyones[name] = [*made.values()]
        return made.get(own)

    everywhere = [*fronts.values()]
    for name, index in graph.outputs.items():
        where = [given[name]] if name in given and name not in graph.made else everywhere
        labels[name] = put(name, index, where)
    written = {}
    for name in graph.input_names:
        index = graph.value(name).index
        if graph.last_version(index):
            twin.storages.used.add(index)
            written[name] = put(f"{name}.written", index, everywhere) or ""
    if graph.followed is not None:
        followed = [label for name in graph.followed.outputs for label in everyones.get(name, ())]
        twin.followed = graph.followed._replace(outputs=frozenset(followed))
    random = labels.pop(_STATE, None)
    check_arguments(place=options.get("place"))
    drawing = dict.fromkeys((task.name for task in graph.tasks if task.random), machine.host)
    place = {**drawing, **(options.get("place") or {})}
    ends = Ends(labels, written, random, machine.rank is None)
    return twin, ends, {"outputs": devices, "place": place}


def _check(graph: Captured, machine: Machine) -> None:
    if machine.accelerators and not machine.imagined:
        raise ScheduleError(
            "a function of all ranks runs on their CPUs, and this machine has accelerators; give "
            "each rank a machine of its own, Machine.local()"
        )
    for task in filter(counts_in_memory, graph.tasks):
        roots = {graph.values[use.value].root for use in task.reads}
        for name in graph.input_names:
            index = graph.value(name).index
            if index in roots and graph.last_version(index):
                raise ScheduleError(
                    f"{name!r} is written in place, and {task.name!r} addresses its memory beyond "
                    "its elements, which other ranks would not get; pass a clone"
                )


def _devices(graph: Captured, wanted: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the devices of outputs that the user gave."""
    if isinstance(wanted, str) or wanted is None:
        return {} if wanted is None else dict.fromkeys(graph.outputs, wanted)
    return by_pattern(wanted, graph.outputs, "outputs", "output")


# ---- agreement


def same_capture(name: str, number: int, why: Callable[[], str]) -> None:
    """Raise ScheduleError, on all ranks, unless all use the capture with the same number.

    It is 0 for a new one, ``why`` says for what reason, and -1 where a call is wrong.
    """
    group = joined()
    what = f"a call of {name!r}"
    if {*group.gather(what, lambda: number)} == {number}:
        return
    texts = group.gather(f"{what}, to compare", why)
    by_kind = {text: f"rank {rank} {text}" for rank, text in reversed([*enumerate(texts)])}
    kinds = sorted(by_kind.values(), key=lambda text: "uses capture" in text)
    raise ScheduleError(
        f"the ranks call {name!r} differently: {', '.join(kinds[:2])}; all of them "
        "must call it with equal arguments, and with modules and optimizers in the same state"
    )


def captured_alike(name: str, capture: Callable[[], Captured]) -> Captured:
    """Return a capture; raise on all ranks what it raises on one, and where captures differ."""
    what = f"the capture of {name!r}"
    made = joined().together(what, capture)
    joined().compare(what, f"its capture of {name!r}", lines_of(made))
    return made


def lines_of(graph: Captured) -> list[str]:
    """Describe the inputs, tasks and outputs of a capture in words that are the same on all ranks."""
    facts = {
        name: f"{item.dtype} {tuple(item.shape)}, strides {item.stride()}"
        if isinstance(item, torch.Tensor)
        else shown(item)
        for name, item in graph.examples.items()
    }
    return [
        *(f"input {name}: {text}" for name, text in facts.items()),
        *(_ADDRESS.sub("", f"task {t.name}: {t.args} {dict(t.kwargs)}") for t in graph.tasks),
        *(f"output {name}: {graph.values[i].name}" for name, i in graph.outputs.items()),
    ]
