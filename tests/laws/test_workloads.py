"""Programs that people write: random readers and writers, stencils, FFTs, trees, sweeps, factorizations.

Each is held to its serial run bit for bit, to what mathematics says, and to how much of it must
overlap.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import autosched as asc
from autosched.testing import scattered
from tests.serial import some

NORMAL = torch.Generator().manual_seed(0)


class Workload(NamedTuple):
    graph: asc.Graph
    inputs: dict[str, torch.Tensor]
    right: Callable[
        [dict[str, torch.Tensor]], bool
    ]  # by what the inputs were, and what is left of them or put out
    width: float  # how many tasks at a time there are to run, at least, on average


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=NORMAL, dtype=torch.float64)


def readers_and_writers(tasks: int = 3_000, variables: int = 100) -> Workload:
    """Random tasks on random variables, as schedulers of engines are tested: each writes one, and reads a few."""
    source, graph = random.Random(0), asc.Graph()
    names = [f"v{i}" for i in range(variables)]
    values, held = graph.inputs(*names), [float(i) for i in range(variables)]
    for number in range(tasks):
        into, *read = source.sample(range(variables), source.randint(1, 4))
        graph.add(
            absorb,
            values[into],
            number,
            *[values[i] for i in read],
            writes=values[into],
            outputs=(),
        )
        held[into] = (held[into] * 3 + number + sum(held[i] for i in read)) % 65521
    inputs = {name: torch.tensor(float(i), dtype=torch.float64) for i, name in enumerate(names)}
    return Workload(graph, inputs, lambda left: [left[name].item() for name in names] == held, 10)


def absorb(into: torch.Tensor, number: int, *others: torch.Tensor) -> None:
    into.mul_(3).add_(number)
    for other in others:
        into.add_(other)
    into.remainder_(65521)


def stencil(size: int = 18, tile: int = 4, steps: int = 3) -> Workload:
    """Jacobi's method between two grids, by tiles that read their neighbours' edges and write their own slice."""
    graph, start = asc.Graph(), randn(size, size)
    here, there = graph.inputs("a", "b")
    expected = start.clone()
    for _ in range(steps):
        for i in range(1, size - 1, tile):
            for j in range(1, size - 1, tile):
                around = here[i - 1 : i + tile + 1, j - 1 : j + tile + 1]
                there[i : i + tile, j : j + tile] = graph.add(relaxed, around)
        here, there = there, here
        inner = relaxed(expected)
        expected = expected.clone()
        expected[1:-1, 1:-1] = inner
    graph.output(result=here)
    inputs = {"a": start, "b": start.clone()}
    return Workload(graph, inputs, lambda left: torch.allclose(left["result"], expected), 4)


def relaxed(x: torch.Tensor) -> torch.Tensor:
    return (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 4


def fft(n: int = 32) -> Workload:
    """Cooley and Tukey's transform in place: butterflies of two elements, slices of one tensor."""
    bits = n.bit_length() - 1
    graph, signal = asc.Graph(), randn(n)
    x = graph.input("x")
    half = 1
    while half < n:
        for block in range(0, n, 2 * half):
            for k in range(half):
                twiddle = cmath.exp(-1j * cmath.pi * k / half)
                low, high = x[block + k : block + k + 1], x[block + k + half : block + k + half + 1]
                graph.add(butterfly, low, high, twiddle, writes=[low, high], outputs=())
        half *= 2
    graph.output(x=x)
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(n)]
    inputs = {"x": signal[order].to(torch.complex128)}
    return Workload(
        graph,
        inputs,
        lambda left: torch.allclose(left["x"], torch.fft.fft(signal.to(torch.complex128))),
        8,
    )


def butterfly(low: torch.Tensor, high: torch.Tensor, twiddle: complex) -> None:
    turned = high * twiddle
    high.copy_(low - turned)
    low.add_(turned)


def tree(leaves: int = 64) -> Workload:
    """A reduction by pairs, of the rows of a matrix."""
    graph, rows = asc.Graph(), randn(leaves, 5)
    matrix = graph.input("rows")
    level = [matrix[i] for i in range(leaves)]
    while len(level) > 1:
        level = [graph.add(torch.add, a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    graph.output(total=level[0])
    return Workload(
        graph, {"rows": rows}, lambda left: torch.allclose(left["total"], rows.sum(0)), 10
    )


def sweep(tiles: int = 8, tile: int = 3) -> Workload:
    """A wavefront: each tile of a grid needs the one above and the one to the left (longest common subsequences)."""
    graph, size = asc.Graph(), tiles * tile + 1
    source = random.Random(1)
    texts = [[source.choice("abc") for _ in range(size - 1)] for _ in range(2)]
    table = graph.input("table")
    for i in range(1, size, tile):
        for j in range(1, size, tile):
            block = table[i : i + tile, j : j + tile]
            above, left = table[i - 1, j - 1 : j + tile], table[i : i + tile, j - 1]
            parts = texts[0][i - 1 : i - 1 + tile], texts[1][j - 1 : j - 1 + tile]
            graph.add(
                common,
                block,
                above,
                left,
                "".join(parts[0]),
                "".join(parts[1]),
                writes=block,
                outputs=(),
            )
    graph.output(table=table)
    expected = torch.zeros(size, size)
    common(expected[1:, 1:], expected[0], expected[1:, 0], *map("".join, texts))
    return Workload(
        graph,
        {"table": torch.zeros(size, size)},
        lambda left: torch.equal(left["table"], expected),
        4,
    )


def common(block: torch.Tensor, above: torch.Tensor, left: torch.Tensor, a: str, b: str) -> None:
    rows = [above.tolist()]
    for i, char in enumerate(a):
        row = [left[i].item()]
        for j, other in enumerate(b):
            row.append(rows[-1][j] + 1 if char == other else max(rows[-1][j + 1], row[j]))
        rows.append(row)
    block.copy_(torch.tensor([row[1:] for row in rows[1:]]))


def cholesky(tiles: int = 5, tile: int = 3) -> Workload:
    """The tiled factorization, in place, by slices of one matrix."""
    graph, n = asc.Graph(), tiles * tile
    root = randn(n, n)
    matrix = root @ root.T + n * torch.eye(n, dtype=torch.float64)
    a = graph.input("a")

    def at(i: int, j: int) -> asc.Value:
        return a[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile]

    for k in range(tiles):
        at(k, k)[:] = graph.add(torch.linalg.cholesky, at(k, k))
        for i in range(k + 1, tiles):
            at(i, k)[:] = graph.add(solved, at(k, k), at(i, k))
        for i in range(k + 1, tiles):
            for j in range(k + 1, i + 1):
                at(i, j).sub_(at(i, k) @ at(j, k).T)
    graph.output(lower=graph.add(torch.tril, a))
    return Workload(
        graph,
        {"a": matrix},
        lambda left: torch.allclose(left["lower"], torch.linalg.cholesky(matrix)),
        2.5,
    )


def solved(diagonal: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(diagonal, below.T, upper=False).T


def merge_sort(n: int = 64, leaf: int = 8) -> Workload:
    """Runs are sorted and merged by pairs, out of place."""
    graph, numbers = asc.Graph(), randn(n)
    level = list(graph.add(torch.split, graph.input("x"), leaf, outputs=n // leaf))
    level = [
        graph.add(lambda run: run.sort().values, run, name=f"sorted{i}")
        for i, run in enumerate(level)
    ]
    while len(level) > 1:
        level = [graph.add(merged, a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    graph.output(sorted=level[0])
    return Workload(
        graph, {"x": numbers}, lambda left: torch.equal(left["sorted"], numbers.sort().values), 2
    )


def merged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b]).sort().values


WORKLOADS = [readers_and_writers, stencil, fft, tree, sweep, cholesky, merge_sort]
ONE_CPU = asc.Machine([asc.Device("cpu", streams=4)], imagined=True)
SECOND_EACH = asc.Costs(default_seconds=1.0, default_nbytes=0)


def left_by(run: Callable[..., dict[str, Any]], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    return given | run(**given)


@pytest.mark.parametrize("make", WORKLOADS)
@pytest.mark.parametrize(
    ("gpus", "policies"),
    some(
        [(gpus, policies) for gpus in (0, 1, 3, 7) for policies in ("auto", "plain")], (3, "plain")
    ),
)
def test_scheduled_it_leaves_what_the_serial_run_leaves_and_that_is_right(
    make: Callable[[], Workload], gpus: int, policies: str
) -> None:
    work = (
        make()
        if make is not readers_and_writers
        else readers_and_writers(tasks=300 if policies == "plain" else 100)
    )
    expected = left_by(work.graph.run_serial, work.inputs)
    assert work.right(expected)
    machine = asc.Machine.emulated(gpus=gpus) if gpus else ONE_CPU
    plain = (
        ["heft"]
        if make is readers_and_writers
        else ["single", "round_robin", "heft", scattered(gpus)]
    )
    for policy in plain if policies == "plain" else ["auto"]:
        with asc.schedule(
            work.graph, machine, policy=policy, costs=SECOND_EACH, backend="virtual"
        ) as schedule:
            schedule.verify()
            for _ in range(2):
                found = left_by(schedule, work.inputs)
                assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", WORKLOADS)
def test_in_real_threads_it_leaves_the_same(make: Callable[[], Workload]) -> None:
    work = make() if make is not readers_and_writers else readers_and_writers(tasks=1_000)
    expected = left_by(work.graph.run_serial, work.inputs)
    assert work.right(expected)
    with asc.schedule(
        work.graph, ONE_CPU, policy="heft", costs=SECOND_EACH, backend="threads"
    ) as schedule:
        assert len(schedule.program.streams) == 4
        for _ in range(3):
            found = left_by(schedule, work.inputs)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", WORKLOADS)
def test_nothing_orders_what_could_overlap(make: Callable[[], Workload]) -> None:
    """On a machine that is wide enough a run takes as long as the longest chain that the algorithm has."""
    work = make()
    wide = asc.Machine([asc.Device("cpu", streams=200, launch_seconds=0)], imagined=True)
    schedule = asc.schedule(work.graph, wide, policy="heft", costs=SECOND_EACH)
    ends: list[float] = []
    for task in work.graph.tasks:
        ends.append(max([ends[d.task] for d in task.dependencies], default=0) + (not task.view))
    assert schedule.makespan == max(ends)
    real = sum(not task.view for task in work.graph.tasks)
    assert real / schedule.makespan >= work.width
