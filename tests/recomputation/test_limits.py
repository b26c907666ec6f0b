"""Programs whose memory is limited: tasks are repeated, and the results are those of the serial run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.runtime.backends.virtual import Virtual
from autosched.scheduling.saved import from_text
from autosched.scheduling.schedule import joined
from autosched.simulated_gpus import playing
from autosched.testing import contrary, uniform

SIDE = 8  # values are square matrices of numbers of 8 bytes
NBYTES = SIDE * SIDE * 8

Layer = Callable[[asc.Graph, Any, str], Any]


def _dropout(graph: asc.Graph, h: Any, on: str) -> Any:
    return graph.add(torch.nn.functional.dropout, h, 0.5, training=True, on=on)


def _transposed(graph: asc.Graph, h: Any, on: str) -> Any:
    return graph.add(torch.cos, h.t(), on=on)


def _in_place(graph: asc.Graph, h: Any, on: str) -> Any:
    made = graph.add(torch.tanh, h, on=on)
    made.mul_(0.5)
    return made


def _rows(graph: asc.Graph, h: Any, on: str) -> Any:
    upper, lower = graph.add(torch.chunk, graph.add(torch.sin, h, on=on), 2, outputs=2)
    return graph.add(torch.cat, [lower, upper], on=on)


LAYERS: Mapping[str, Layer] = {
    "sin": lambda graph, h, on: graph.add(torch.sin, h, on=on),
    "dropout": _dropout,
    "transposed": _transposed,
    "in place": _in_place,
    "rows": _rows,
}


@st.composite
def steps(draw: st.DrawFn, layers: Sequence[str] = (*LAYERS,)) -> asc.Graph:
    """Layers whose results are read again in the opposite order, as backward does, on one GPU or two."""
    graph = asc.Graph("step")
    h, w = graph.inputs("x", "w")
    kinds = draw(st.lists(st.sampled_from(layers), min_size=3, max_size=9))
    half = draw(st.sampled_from([len(kinds), len(kinds) // 2]))
    saved = []
    for i, kind in enumerate(kinds):
        on = f"cuda:{int(i >= half)}"
        saved.append((h, on))
        h = LAYERS[kind](graph, h, on)
    for h_before, on in reversed(saved):
        h = graph.add(torch.addcmul, h, h_before, h, value=0.1, on=on)
    if draw(st.booleans()):
        w.sub_(h)
    graph.output(y=h)
    return graph


def given_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = SIDE, SIDE
    return {
        name: torch.rand(shape, dtype=torch.float64, generator=generator) for name in ("x", "w")
    }


def left_by(run: Callable[..., Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    inputs = given_inputs()
    return {**run(**inputs), **inputs}


def with_what_suffices(machine: asc.Machine, limit: float, message: str) -> asc.Machine:
    """Return the machine with the limits that an error says suffice."""
    _, _, said = message.partition("A plan exists with ")
    least = re.search(r"none needs less than ([\d,]+) B$", said)
    found = {
        name: float(nbytes.replace(",", ""))
        for nbytes, name in re.findall(r"([\d,]+) B on (cuda:\d)", said)
    }
    assert least is not None
    assert found
    assert all(nbytes >= float(least[1].replace(",", "")) for nbytes in found.values())
    devices = machine.limited(limit).devices
    return replace(
        machine, devices=tuple(replace(d, nbytes=found.get(d.name, d.nbytes)) for d in devices)
    )


def test_what_a_limit_costs_is_said() -> None:
    graph = asc.Graph()
    h, saved = graph.input("x"), []
    with graph.on("cuda:0"):
        for _ in range(6):
            saved.append(h := graph.add(torch.sin, h))
        for before in reversed(saved):
            h = graph.add(torch.mul, h, before)
    graph.output(y=h)
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=NBYTES)
    machine = asc.Machine.emulated(gpus=1)
    notes = [
        [note for note in made.explain().notes if note.startswith("limits of memory cost ")]
        for made in (
            asc.schedule(graph, machine, costs=costs),
            asc.schedule(graph, machine.limited(5 * NBYTES), costs=costs),
        )
    ]
    assert notes[0] == []
    assert re.search(r"%: without limits it would take .*, and .* with 10% more memory$", *notes[1])


@given(data=st.data(), graph=steps())
def test_a_step_equals_the_serial_run_within_any_limit(
    data: st.DataObject, graph: asc.Graph
) -> None:
    machine = asc.Machine.emulated(gpus=2)
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=NBYTES)
    free = asc.schedule(graph, machine, costs=costs)
    peak = max(free.peak_bytes[name] for name in machine.accelerators)
    assert (
        asc.schedule(graph, asc.Machine.emulated(gpus=2, nbytes=peak), costs=costs).recomputed == ()
    )
    limit = NBYTES * data.draw(st.integers(2, max(4, int(peak / NBYTES))))
    limited = asc.Machine.emulated(gpus=2, nbytes=limit)
    choose = data.draw(st.sampled_from([uniform, contrary]))(data.draw(st.integers(0, 999)))
    try:
        made = asc.schedule(graph, limited, costs=costs, backend=Virtual(choose))
    except MemoryLimitError as error:
        limited = with_what_suffices(machine, limit, str(error))
        made = asc.schedule(graph, limited, costs=costs, backend=Virtual(choose))
    made.verify()
    assert all(made.peak_bytes[d.name] <= d.nbytes for d in limited.devices)
    assert made.makespan >= free.lower_bound * (1 - 1e-9)
    expected = left_by(graph.run_serial)
    for _ in range(2):
        found = left_by(made)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    if made.recomputed:
        text = replace(made, backend="emulated").text
        assert joined(from_text(text), graph).recomputed == made.recomputed


@given(graph=steps(), counts=st.sets(st.integers(4, 14), min_size=2, max_size=4))
def test_more_memory_is_never_slower(graph: asc.Graph, counts: set[int]) -> None:
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=NBYTES)
    machine = asc.Machine.emulated(gpus=2)
    machines = [machine.limited(NBYTES * count) for count in sorted(counts, reverse=True)]
    found = asc.compare(graph, [machine, *machines], "auto", costs=costs)
    spans = [row.makespan for row in found.rows]
    assert spans == sorted(spans)
    assert found.rows[0].memory is None
    assert len(found.rows) + len(found.refusals) == len(machines) + 1


# The memory that dropout takes while it runs, for a mask and a product, is not known.
@given(graph=steps([name for name in LAYERS if name != "dropout"]), count=st.integers(5, 10))
def test_played_gpus_hold_no_more_than_their_limits(graph: asc.Graph, count: int) -> None:
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=NBYTES)
    with playing(gpus=2):
        machine = asc.Machine.local(gpus=2).limited(NBYTES * count)
        with (
            contextlib.suppress(MemoryLimitError),
            asc.schedule(graph, machine, costs=costs) as made,
        ):
            expected = {name: item.cpu() for name, item in left_by(made.run_serial).items()}
            left_by(made)  # is watched
            for gpu in range(2):
                torch.cuda.synchronize(gpu)
                torch.cuda.reset_peak_memory_stats(gpu)
            found = left_by(made)
            for gpu in range(2):
                torch.cuda.synchronize(gpu)
                assert torch.cuda.max_memory_allocated(gpu) <= NBYTES * count
            assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


def test_what_repeats_random_numbers_is_not_replayed() -> None:
    graph = asc.Graph()
    value = graph.input("x")
    made = [value := LAYERS["dropout"](graph, value, "cuda:0") for _ in range(4)]
    for one in reversed(made):
        value = graph.add(torch.mul, value, one, on="cuda:0")
    graph.output(y=value)
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=NBYTES)
    with playing(gpus=1):
        machine = asc.Machine.local(gpus=1).limited(4 * NBYTES)
        with asc.schedule(graph, machine, costs=costs, replay=True) as made:
            assert any(made.graph.task(name).random for name in made.recomputed)
            for _ in range(4):
                (expected,), (found,) = (
                    [item.cpu() for name, item in left_by(run).items() if name == "y"]
                    for run in (lambda x, w: made.run_serial(x=x), lambda x, w: made(x=x))
                )
                assert torch.equal(found, expected)
            assert "cannot repeat them" in str(made.not_replayed)
