"""Which gradients share a bucket; what sums over devices: the values, the order, the bytes on each link, the time."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import autosched as asc
from autosched.costs.estimate import estimate
from autosched.parallel.all_reduce import STRATEGIES, all_reduce, buckets
from autosched.program.program import Copy

DTYPES = (torch.float32, torch.float64, torch.bfloat16)

# ---- buckets


TENSORS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["float32", "bfloat16", "float64"])), max_size=30
)
SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=4)


def named(drawn: Sequence[tuple[int, str]]) -> list[tuple[str, int, str]]:
    return [(f"p{i}", nbytes, dtype) for i, (nbytes, dtype) in enumerate(drawn)]


@given(drawn=TENSORS, sizes=SIZES)
def test_buckets_are_those_of_distributed_data_parallel(
    drawn: list[tuple[int, str]], sizes: list[int]
) -> None:
    tensors = [(name, nbytes // 8 * 8, dtype) for name, nbytes, dtype in named(drawn)]
    made = [
        torch.empty(n // getattr(torch, d).itemsize, dtype=getattr(torch, d)) for _, n, d in tensors
    ]
    if not made:  # which torch refuses
        assert buckets([], sizes) == ()
        return
    distributed = pytest.importorskip("torch.distributed")
    expected, _ = distributed._compute_bucket_assignment_by_size(made, sizes, [False] * len(made))
    assert buckets(tensors, sizes) == tuple(tuple(f"p{i}" for i in bucket) for bucket in expected)


@pytest.mark.parametrize("sizes", [(), (-1,), ("1 MiB",), "1 MiB", 5, (math.nan,)])
def test_invalid_bucket_sizes_are_rejected(sizes: object) -> None:
    with pytest.raises(
        asc.ScheduleError, match="sizes of buckets must be one or more numbers of bytes"
    ):
        buckets([("w", 4, "float32")], sizes)  # type: ignore[arg-type]


# ---- sums


def in_order(given: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, given)


def around(given: Sequence[Tensor]) -> Tensor:
    """Sum pieces of ceil(numel / n), piece k in the order k + 1, k + 2, ..., k."""
    n = len(given)
    pieces = [flat.split(max(1, math.ceil(len(flat) / n))) for flat in given]
    return torch.cat(
        [in_order([pieces[(k + 1 + i) % n][k] for i in range(n)]) for k in range(len(pieces[0]))]
    )


ORDERS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": in_order,
    "cpu": in_order,
    "ring": around,
    "exchange": in_order,
    "gather": in_order,
}


def summing(strategy: str, machine: asc.Machine, numel: int, itemsize: int = 4) -> asc.Graph:
    """Sum what one task per device makes; each device reads the total."""
    graph, devices = asc.Graph(strategy), machine.accelerators
    flats = []
    for i, device in enumerate(devices):
        with graph.on(device):
            flats.append(
                graph.add(torch.neg, graph.input(f"r{i}"), seconds=0.0, nbytes=numel * itemsize)
            )
    totals = all_reduce(
        graph, flats, devices, strategy, machine=machine, numel=numel, itemsize=itemsize, name="b"
    )
    for i, (device, total) in enumerate(zip(devices, totals, strict=True)):
        read = graph.add(torch.clone, total, on=device, seconds=0.0, nbytes=numel * itemsize)
        graph.output(**{f"t{i}": read})
    return graph


def planned(strategy: str, machine: asc.Machine, numel: int, itemsize: int = 4) -> asc.Schedule:
    return asc.schedule(summing(strategy, machine, numel, itemsize), machine, policy="heft")


def numbers(n: int, numel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(n * 1000 + numel)
    return {
        f"r{i}": (torch.randn(numel, generator=generator) * 10.0 ** (i % 3)).to(dtype)
        for i in range(n)
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(n=st.integers(1, 5), numel=st.integers(0, 24), dtype=st.sampled_from(DTYPES))
def test_all_devices_read_the_serial_sum_in_the_documented_order(
    strategy: str, n: int, numel: int, dtype: torch.dtype
) -> None:
    machine, given = asc.Machine.emulated(gpus=n), numbers(n, numel, dtype)
    graph = summing(strategy, machine, numel, dtype.itemsize)
    expected = ORDERS[strategy]([-tensor for tensor in given.values()])
    with asc.schedule(graph, machine, policy="heft", backend="virtual") as schedule:
        totals = schedule(**given)
    assert len(totals) == n
    assert all(total.dtype == dtype and torch.equal(total, expected) for total in totals.values())


# ---- bytes and seconds


def traffic(schedule: asc.Schedule) -> dict[tuple[str, str], float]:
    """Return the bytes that a program copies from device to device."""
    moved: Counter[tuple[str, str]] = Counter()
    for item in schedule.program.instructions:
        if isinstance(item, Copy):
            moved[item.source, item.destination] += schedule.costs.value_nbytes(
                schedule.graph.value(item.value)
            )
    return dict(moved)


def expected_traffic(strategy: str, n: int, nbytes: int) -> dict[tuple[str, str], float]:
    gpus = [f"cuda:{i}" for i in range(n)]
    match strategy:
        case "sum":
            pairs = [(gpus[0], gpu) for gpu in gpus[1:]]
        case "cpu":
            pairs = [("cpu", gpu) for gpu in gpus]
        case "exchange":
            return dict.fromkeys(itertools.permutations(gpus, 2), 2 / n * nbytes)
        case "gather":
            return dict.fromkeys(itertools.permutations(gpus, 2), nbytes)
        case _:
            return {(gpus[i], gpus[(i + 1) % n]): 2 * (n - 1) / n * nbytes for i in range(n)}
    return {ends: nbytes for a, b in pairs for ends in ((a, b), (b, a))}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("policy", ["heft", "round_robin"])
def test_the_bytes_on_each_link_are_those_of_the_formula(
    strategy: str, n: int, policy: str
) -> None:
    machine = asc.Machine.emulated(gpus=n)
    with asc.schedule(summing(strategy, machine, n * 100), machine, policy=policy) as schedule:
        assert traffic(schedule) == expected_traffic(strategy, n, n * 400)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_costs_of_tasks_equal_estimated_costs(strategy: str) -> None:
    machine = asc.Machine.emulated(gpus=4)
    graph = summing(strategy, machine, 400)
    learnt = estimate(graph, numbers(4, 400, torch.float32))
    for task in graph.tasks:
        if task.name.startswith(("b.add", "b.cat")):
            device = machine.device(next(iter(task.seconds)))  # type: ignore[arg-type]
            assert asc.Costs().task_seconds(task, device) == pytest.approx(
                learnt.costs.work[task.name].seconds(device)
            )
    for value in graph.values:
        if value.nbytes is not None:
            assert value.nbytes == learnt.costs.nbytes[value.name], value.name


def seconds(strategy: str, n: int, link: str, numel: int) -> float:
    with planned(strategy, asc.Machine.emulated(gpus=n, link=link), numel) as schedule:
        return schedule.makespan


def test_a_ring_of_large_buckets_reaches_the_bandwidth_of_its_links() -> None:
    n, nbytes = 8, 2**28
    least = 2 * (n - 1) / n * nbytes / 25e9
    assert least <= seconds("ring", n, "pcie4", nbytes // 4) < 1.15 * least
    assert seconds("sum", n, "pcie4", nbytes // 4) > 2 * least  # 8 by bytes alone


def test_where_only_the_host_has_links_it_is_quicker_than_what_goes_through_it() -> None:
    whole = asc.Machine.emulated(gpus=2)
    star = asc.Machine(
        whole.devices, [link for link in whole.links if link.source == "cpu"], imagined=True
    )
    with planned("cpu", star, 1000) as schedule, planned("sum", star, 1000) as through:
        assert 0 < schedule.makespan < through.makespan


def of_nodes(nodes: int, each: int) -> asc.Machine:
    """Return GPUs joined by faster links inside of nodes than between them, and a host."""
    names = [f"cuda:{i}" for i in range(nodes * each)]
    links = [asc.Link("cpu", name, 25e9) for name in names]
    for a, b in itertools.combinations(range(len(names)), 2):
        links.append(asc.Link(names[a], names[b], 360e9 if a // each == b // each else 40e9, 1e-5))
    return asc.Machine([asc.Device("cpu"), *map(asc.Device, names)], links, imagined=True)


@given(
    nodes=st.integers(2, 3),
    each=st.integers(2, 3),
    numel=st.integers(0, 24),
    dtype=st.sampled_from(DTYPES),
)
def test_an_exchange_sums_nodes_and_then_their_sums(
    nodes: int, each: int, numel: int, dtype: torch.dtype
) -> None:
    machine, given = of_nodes(nodes, each), numbers(nodes * each, numel, dtype)
    flats = [-tensor for tensor in given.values()]
    expected = in_order([in_order(flats[i : i + each]) for i in range(0, len(flats), each)])
    graph = summing("exchange", machine, numel, dtype.itemsize)
    with asc.schedule(graph, machine, policy="heft", backend="virtual") as schedule:
        assert all(torch.equal(total, expected) for total in schedule(**given).values())


def test_an_exchange_sends_disjoint_chunks_to_other_nodes() -> None:
    with planned("exchange", of_nodes(4, 2), 800) as schedule:
        sent = traffic(schedule)
    far = {
        ends: nbytes
        for ends, nbytes in sent.items()
        if int(ends[0][5:]) // 2 != int(ends[1][5:]) // 2
    }
    gpus = itertools.permutations(range(8), 2)
    pairs = [(a, b) for a, b in gpus if a // 2 != b // 2 and a % 2 == b % 2]
    assert far == {(f"cuda:{a}", f"cuda:{b}"): 2 / 4 * 3200 / 2 for a, b in pairs}


def test_nodes_of_different_sizes_are_treated_as_one() -> None:
    whole = of_nodes(2, 2)
    machine = asc.Machine(
        whole.devices[:-1], [k for k in whole.links if "cuda:3" not in (k.source, k.destination)]
    )
    with planned("exchange", machine, 300) as schedule:
        assert traffic(schedule) == dict.fromkeys(
            itertools.permutations(machine.accelerators, 2), 2 / 3 * 1200
        )
