"""What compression does to a sum over devices, and how far off it may be; that error feedback loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import autosched as asc
from autosched.costs.estimate import estimate
from autosched.parallel.all_reduce import (
    Compression,
    Half,
    Int8,
    TopK,
    compressed_all_reduce,
    decoded_sum,
    encode_,
)
from autosched.program.program import Copy

COMPRESSIONS: Sequence[Compression] = (Half(), Half(torch.bfloat16), Int8(), TopK(0.1), TopK(1.0))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
each_compression = pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)

FINITE = st.lists(st.floats(-6e4, 6e4, width=32), max_size=40)


def through(compression: Compression, flat: Tensor) -> Tensor:
    return compression.decode(compression.encode(flat), len(flat), flat.dtype)


# ---- one tensor


@each_compression
@given(numel=st.integers(0, 70), dtype=st.sampled_from(DTYPES))
def test_payloads_have_the_documented_size(
    compression: Compression, numel: int, dtype: torch.dtype
) -> None:
    payload = compression.encode(torch.linspace(-1, 1, numel, dtype=dtype))
    assert payload.nbytes == compression.nbytes(numel, dtype)
    decoded = compression.decode(payload, numel, dtype)
    assert (decoded.shape, decoded.dtype) == ((numel,), dtype)


@given(numbers=FINITE, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_half_precision_is_off_by_a_rounding(numbers: list[float], dtype: torch.dtype) -> None:
    flat = torch.tensor(numbers, dtype=dtype)
    assert ((through(Half(), flat) - flat).abs() <= (2**-11 * flat.abs()).clamp(min=2**-25)).all()
    normal = flat[flat.abs() > 1e-30]
    assert ((through(Half(torch.bfloat16), normal) - normal).abs() <= 2**-8 * normal.abs()).all()


@given(
    numbers=FINITE,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    factor=st.sampled_from([1, 1e-36, 1e30]),
)
def test_int8_is_off_by_half_its_scale(
    numbers: list[float], dtype: torch.dtype, factor: float
) -> None:
    flat = torch.tensor(numbers, dtype=dtype) * factor
    scale = max(flat.abs().max().item() / 127, torch.finfo(dtype).tiny) if numbers else 0
    assert ((through(Int8(), flat) - flat).abs() <= 0.5001 * scale).all()


@given(numbers=FINITE, share=st.floats(0.01, 1))
def test_top_k_leaves_at_most_its_share_of_the_squares(numbers: list[float], share: float) -> None:
    flat = torch.tensor(numbers, dtype=torch.float64)
    compression = TopK(share)
    sent = through(compression, flat)
    kept = compression.count(len(flat)) / max(1, len(flat))
    assert kept >= share or not numbers
    assert (flat - sent).square().sum() <= (1 - kept) * flat.square().sum() * (1 + 1e-12)
    assert ((sent == flat) | (sent == 0)).all()


def test_int8_handles_tiny_values() -> None:
    flat, residual = torch.tensor([2.7e-43]), torch.zeros(1)  # whose 127th part has one bit
    assert through(Int8(), flat).tolist() == [0]
    encode_(flat, residual, Int8())
    assert torch.equal(residual, flat)


@each_compression
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@each_dtype
def test_nan_and_infinity_appear_in_the_total_and_not_in_the_residual(
    compression: Compression, number: float, dtype: torch.dtype
) -> None:
    flat, residual = torch.linspace(-1, 1, 40, dtype=dtype), torch.zeros(40, dtype=dtype)
    flat[[3, 17, 18, 19, 20, 30]] = number  # more than a tenth
    total = decoded_sum([encode_(flat, residual, compression)], compression, 40, dtype)
    assert not total.isfinite().all()
    assert residual.isfinite().all()


@pytest.mark.parametrize("share", [0, 1.5, math.nan, "all"])
def test_invalid_arguments_are_rejected(share: float) -> None:
    with pytest.raises(asc.ScheduleError, match="share of the elements above 0 and at most 1"):
        TopK(share)
    with pytest.raises(asc.ScheduleError, match=r"float16 or torch\.bfloat16, got torch\.float32"):
        Half(torch.float32)


# ---- on devices


def exchanging(
    compression: Compression, n: int, numel: int, dtype: torch.dtype
) -> tuple[asc.Graph, tuple[str, ...]]:
    """Exchange what one task per device makes; each device reads the total."""
    graph, machine = asc.Graph("exchange"), asc.Machine.emulated(gpus=n)
    flats = []
    nbytes = numel * dtype.itemsize
    for i, device in enumerate(machine.accelerators):
        with graph.on(device):
            flats.append(graph.add(torch.neg, graph.input(f"r{i}"), seconds=0.0, nbytes=nbytes))
    totals, kept = compressed_all_reduce(
        graph, flats, machine.accelerators, compression, machine=machine, numel=numel, dtype=dtype,
        name="b",
    )  # fmt: skip
    for i, (device, total) in enumerate(zip(machine.accelerators, totals, strict=True)):
        graph.output(**{f"t{i}": graph.add(torch.clone, total, on=device, seconds=0.0)})
    return graph, kept


def gradients(n: int, numel: int, dtype: torch.dtype, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + numel + step * 10**6)
    return {f"r{i}": torch.randn(numel, generator=generator).to(dtype) for i in range(n)}


def zeros(kept: Sequence[str], numel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(numel, dtype=dtype) for name in kept}


@each_compression
@given(
    n=st.integers(2, 4),
    numel=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_applied_totals_plus_residuals_are_the_sum_of_all_gradients(
    compression: Compression, n: int, numel: int, dtype: torch.dtype
) -> None:
    graph, kept = exchanging(compression, n, numel, dtype)
    residuals = zeros(kept, numel, dtype)
    true, applied = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    with asc.schedule(
        graph, asc.Machine.emulated(gpus=n), policy="heft", backend="virtual"
    ) as schedule:
        for step in range(5):
            given = gradients(n, numel, dtype, step)
            totals = schedule(**given, **residuals)
            assert all(torch.equal(total, totals["t0"]) for total in totals.values())
            applied += totals["t0"]
            true -= sum(tensor.double() for tensor in given.values())
    still = sum(residual.double() for residual in residuals.values())
    assert torch.allclose(applied + still, true, rtol=0, atol=100 * torch.finfo(dtype).eps)


@each_compression
@pytest.mark.parametrize(("n", "numel"), [(1, 8), (3, 0)])
def test_without_messages_there_are_no_residuals(
    compression: Compression, n: int, numel: int
) -> None:
    graph, kept = exchanging(compression, n, numel, torch.float32)
    given = gradients(n, numel, torch.float32)
    assert kept == ()
    assert torch.equal(graph.run_serial(**given)["t0"], -given["r0"])


@each_compression
def test_each_device_sends_its_payload_to_each_other(compression: Compression) -> None:
    n, numel = 4, 1000
    graph, _ = exchanging(compression, n, numel, torch.float32)
    with asc.schedule(graph, asc.Machine.emulated(gpus=n), policy="heft") as schedule:
        copies = [item for item in schedule.program.instructions if isinstance(item, Copy)]
        sent = {
            (c.source, c.destination): schedule.costs.value_nbytes(graph.value(c.value))
            for c in copies
        }
    assert len(copies) == len(sent) == n * (n - 1)
    assert sorted(dict.fromkeys(sent.values())) == [compression.nbytes(numel, torch.float32)]


@each_compression
def test_costs_of_tasks_are_estimated(compression: Compression) -> None:
    n, numel = 3, 10**6
    graph, kept = exchanging(compression, n, numel, torch.float32)
    given = gradients(n, numel, torch.float32) | zeros(kept, numel, torch.float32)
    learnt = estimate(graph, given).costs
    device = asc.Machine.emulated().device("cuda:0")
    for name in ("b.encode.0", "b.decode.0"):
        said = asc.Costs().task_seconds(graph.task(name), device)
        assert said == pytest.approx(learnt.work[name].seconds(device)), name
        assert graph.value(name).nbytes == learnt.nbytes[name]


def test_more_elements_than_an_int32_counts_are_rejected() -> None:
    with pytest.raises(asc.ScheduleError, match="'b' has 2147483648"):
        exchanging(TopK(), 2, 2**31, torch.float32)
