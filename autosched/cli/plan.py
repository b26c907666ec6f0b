"""Run the command plan, which says whether a training step fits, and how long it would take.

The user's function makes the model on torch's device ``meta``, so nothing is computed and no memory
is needed. A step that creates the state of its optimizer is done once, also on ``meta``, since the
steps after it have that state.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autosched._lib.text import amount, duration, table
from autosched.cli.commands import returned
from autosched.cli.output import UserCodeError, json_text
from autosched.errors import AutoschedError, ScheduleError, UsageError, shown
from autosched.machine.machine import Machine
from autosched.scheduling.schedule import Schedule

_FORMS = "(step, arguments) or (model, loss, optimizer, batch)"
_Way = Callable[[Machine], Schedule]


@dataclass(frozen=True)
class Row:
    """One way to run a step: whether it fits, what takes the memory of the fullest GPU, its seconds.

    ``other`` is the rest of the peak: activations, gradients, the batch. Of a way that does not fit,
    bytes and seconds are those that it would need; ``error`` is why there are none.
    """

    gpus: int
    how: str
    fits: bool
    peak: float = 0.0
    parameters: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    seconds: float = 0.0
    bound: float = 0.0
    advice: str = ""
    error: str = ""


def plan(arguments: argparse.Namespace) -> int:
    """Plan a training step for numbers of GPUs, and say whether it fits."""
    import torch

    given = returned(arguments.thing, torch.device("meta"))
    ways = ways_of(given, arguments.thing)
    numbers = dict.fromkeys(arguments.gpus or (1, 2, 4))
    machines = [Machine.emulated(n, arguments.link, nbytes=arguments.memory) for n in numbers]
    rows = [row for machine in machines for row in rows_of(ways, machine)]
    if arguments.json:
        print(json_text([asdict(row) for row in rows]))
        return 0
    heads = ("GPUs", "how", "fits", "peak", "parameters", "optimizer", "other", "step", "at least")
    print("\n".join(table(heads, [_cells(row) for row in rows])))
    for row in rows:
        if row.advice or row.error:
            where = "1 GPU" if row.gpus == 1 else f"{row.gpus} GPUs"
            print(f"\n{where}, {row.how}: {row.advice or row.error}")
    return 0


def _cells(row: Row) -> tuple[str, ...]:
    if row.error:
        return (str(row.gpus), row.how, "no", *["-"] * 6)
    sizes = [amount(n, "B") for n in (row.peak, row.parameters, row.optimizer, row.other)]
    times = duration(row.seconds), duration(row.bound)
    return (str(row.gpus), row.how, "yes" if row.fits else "no", *sizes, *times)


def rows_of(ways: Mapping[str, _Way], machine: Machine) -> Iterator[Row]:
    """Yield a row for each way that uses all GPUs of a machine.

    >>> from autosched import Graph, schedule
    >>> graph = Graph()
    >>> graph.output(graph.add(abs, 1, seconds=1.0, on="cuda:0", nbytes=8))
    >>> ways = {"one by one": lambda machine: schedule(graph, machine)}
    >>> row, = rows_of(ways, Machine.emulated(gpus=1))
    >>> row.fits, row.other, row.seconds
    (True, 8.0, 1.0)
    """
    gpus = machine.accelerators
    if len(gpus) == 1 and "data parallel" in ways:
        ways = {"alone": ways["data parallel"]}
    for how, make in ways.items():
        try:
            try:
                made, why = make(machine), ""
            except ScheduleError as error:
                made, why = make(machine.unlimited), f"does not fit: {error}"
        except AutoschedError as error:
            yield Row(len(gpus), how, False, error=str(error))
            continue
        with made:
            yield _row(made, gpus, how, why)


def _row(made: Schedule, gpus: Sequence[str], how: str, why: str) -> Row:
    fullest = max(gpus, key=made.peak_bytes.__getitem__)
    peak = made.peak_bytes[fullest]
    homes = {True: 0.0, False: 0.0}  # bytes of inputs there, by whether they are the optimizer's
    for value in made.graph.sources:
        if made.problem.homes[value.index] == fullest:
            homes["optimizer." in value.name] += made.costs.value_nbytes(value)
    parallel = how != "compile"  # which takes no policy, and no homes of inputs
    advice = [one for one in made.explain().advice if not (parallel and "=" in one.words)]
    words = f"{advice[0].words} -> {duration(advice[0].makespan)}" if advice else ""
    bytes_of = (peak, homes[False], homes[True], peak - sum(homes.values()))
    return Row(len(gpus), how, not why, *bytes_of, made.makespan, made.lower_bound, why or words)


# ---- what the user's function returned


def ways_of(given: Any, name: str) -> dict[str, _Way]:
    """Return functions that make a schedule for a machine, by the names of the ways."""
    match given:
        case (step, (tuple() | list()) as arguments) if callable(step):
            return {"compile": _step(step, arguments)}
        case (model, loss, optimizer, (tuple() | list()) as batch) if callable(loss):
            return _training(model, loss, optimizer, batch)
    raise UsageError(f"{name} must return {_FORMS}, got {shown(type(given).__name__)}")


def _step(step: Callable[..., Any], arguments: Sequence[Any]) -> _Way:
    from autosched.frontends.capture import capture
    from autosched.scheduling.planning import schedule

    graph = capture(step, *arguments)
    if graph.made and _is_meta(graph.examples.values()):
        with _user_code():
            step(*arguments)
        graph = capture(step, *arguments)
    state = graph.state.tensors()

    def make(machine: Machine) -> Schedule:
        first = machine.accelerators[0]  # where eager mode has the model
        homes = {
            name: first if name in state and example.dim() else machine.host
            for name, example in graph.examples.items()
        }
        return schedule(graph, machine, examples=graph.examples, inputs=homes)

    return make


def _training(model: Any, loss: Any, optimizer: Any, batch: Sequence[Any]) -> dict[str, _Way]:
    from autosched import parallel

    if _is_meta(model.parameters()) and not optimizer.state:
        with _user_code():
            loss(model(*batch[:-1]), batch[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def way(make: Callable[..., Any]) -> _Way:
        def planned(machine: Machine) -> Schedule:
            made: Schedule = make(model, loss, optimizer, machine).schedule(*batch)
            return made

        return planned

    return {"data parallel": way(parallel.data_parallel), "pipeline": way(parallel.pipeline)}


def _is_meta(tensors: Any) -> bool:
    """Whether tensors have no data, but for numbers such as counters."""
    return all(tensor.is_meta for tensor in tensors if getattr(tensor, "numel", int)() > 1)


@contextlib.contextmanager
def _user_code() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UserCodeError("the step failed on torch's device meta") from error
